"""Measure updates in which shared prefixes are computed once, beside the same updates without sharing, in one run.

    python benchmarks/prefixes.py [GROUP_SIZE ..] [--models 0.5M 1M] [--prompt 128]

Random Llama models take updates on two groups of attempts: a prompt of 512 tokens per group, then actions of 32 tokens.
Micro-batches have 4,096 tokens, and torch has one thread. Updates with and without sharing take turns, and the medians
of their CPU seconds are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater

VOCABULARY, ACTION, GROUPS = 4096, 32, 2
MODELS = {"0.5M": (64, 4), "1M": (128, 3), "14M": (320, 10)}
"""Width and layers by name."""


def random_model(width: int, layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def groups_of(size: int, prompt_length: int) -> list[Group]:
    """Return groups of ``size`` attempts with equal prompts, random actions and random rewards."""
    numbers = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(VOCABULARY) for _ in range(count))

    def attempt(group: int, member: int, prompt: tuple[int, ...]) -> Trajectory:
        turn = Turn(
            index=0, parent=None, new_ids=prompt, action_ids=tokens(ACTION), logprobs=(-8.0,) * ACTION,
            version_spans=(PolicyVersionSpan(0, 0),), rewards={}, finish_reason="stop",
            action=Action(Message.assistant(""), ""),
        )  # fmt: skip
        rewards = {"score": numbers.random()}
        name = AttemptId("run", f"task-{group}", group, member)
        return Trajectory(name, name.task, (turn,), Status.COMPLETED, False, rewards, None, ())

    made = []
    for group in range(GROUPS):
        prompt = tokens(prompt_length)
        attempts = tuple(attempt(group, member, prompt) for member in range(size))
        made.append(Group(group, Task(f"task-{group}", ()), attempts, None))
    return made


def update_of(model: PreTrainedModel, share: Literal["on", "off"], groups: Sequence[Group]) -> tuple[float, float]:
    """Return the CPU seconds of an update, and the number of tokens that the model read."""
    algorithm = build_algorithm("grpo", {})
    config = TrainerConfig(share_prefixes=share, micro_tokens=4096)
    trainer = SingleProcessTrainer(model, algorithm, config, temperature=1.0)
    updater = PolicyUpdater(trainer, algorithm, config, reward_weights={}, seed=0, steps=1000)
    selected = [updater.select(group) for group in groups]
    start = time.process_time()
    report = asyncio.run(updater.update(selected))
    return time.process_time() - start, report.metrics["model_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[4, 16, 64])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1M", "14M"])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "group size", "tokens, off", "tokens, on", "seconds, off", "seconds, on", "ratio")
    for name in arguments.models:
        model = random_model(*MODELS[name])
        for size in arguments.sizes:
            groups = groups_of(size, arguments.prompt)
            pairs = [[update_of(model, share, groups) for share in ("off", "on")] for _ in range(arguments.repeats)]
            (off, on) = (statistics.median(pair[index][0] for pair in pairs) for index in range(2))
            tokens = [f"{pairs[0][index][1]:,.0f}" for index in range(2)]
            table.add_row(name, str(size), *tokens, f"{off:.2f}", f"{on:.2f}", f"{off / on:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
