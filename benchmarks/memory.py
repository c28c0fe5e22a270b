"""The estimated memory of a run beside the real peak of its updates, each in a process of its own.

    python benchmarks/memory.py [NAME ..]

A random Llama (or tiny-base) serves from a full KV cache and takes two updates on random attempts that fill the
context; between them its weights and its trainer's state are copied, as for a checkpoint. The peak is the largest
resident memory of the process less the memory when the policy is loaded.
"""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
BFLOAT16 = {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}
LORA = {"trainer.lora.rank": 16}
CHECKPOINTING = {"trainer.activation_checkpointing": True}
FEW = {"groups_per_step": 1, "trainer.micro_tokens": 512}


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its model, and its settings.

    The model is tiny-base (None), a model of ``decode.py`` by its name, or a random Llama with this width, number of
    layers and vocabulary.
    """

    name: str
    model: tuple[int, int, int] | str | None
    settings: Mapping[str, Any]
    context: int = 256


SMALL, LARGE = (320, 10, 8192), (576, 10, 32768)
CASES = {
    case.name: case
    for case in (
        Case("tiny-base", None, {"group_size": 16, "trainer.micro_tokens": 4096}),
        Case("tiny-base, ppo", None, {"group_size": 16, "trainer.micro_tokens": 4096, "algorithm": "ppo"}),
        Case("15M", SMALL, {}),
        Case("15M, micro-batches of 4096", SMALL, {"group_size": 4, "trainer.micro_tokens": 4096}),
        Case("15M, ppo", SMALL, {"algorithm": "ppo"}),
        Case("15M, checkpointing", SMALL, CHECKPOINTING),
        Case("15M, bfloat16", SMALL, BFLOAT16),
        Case("15M, LoRA", SMALL, LORA),
        Case("15M, ppo, LoRA", SMALL, {"algorithm": "ppo", **LORA}),
        Case("61M", LARGE, {}),
        Case("61M, checkpointing", LARGE, CHECKPOINTING),
        Case("61M, LoRA", LARGE, LORA),
        Case("494M, bfloat16, checkpointing", "494M", {**BFLOAT16, **FEW, **CHECKPOINTING, "checkpoint_every": 0}, 512),
        Case("494M, bfloat16, LoRA, checkpointing", "494M", {**BFLOAT16, **FEW, **LORA, **CHECKPOINTING}, 512),
    )
}


def make_model(name: tuple[int, int, int] | str | None) -> Any:
    """Return the model of a case."""
    import torch
    from decode import random_llama
    from transformers import LlamaConfig, LlamaForCausalLM

    from agent_r1.model.load import load_model
    from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name is None:
        return load_model(str(TINY_BASE_FOLDER), torch.float32)
    if isinstance(name, str):
        return random_llama(name)
    width, layers, vocabulary = name
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).eval()


def random_groups(config: Any, context: int, vocabulary: int) -> Iterator[Any]:
    """Yield groups of attempts that fill the context: a prompt of an eighth of it, and one action."""
    from agent_r1.core.inference import PolicyVersionSpan
    from agent_r1.core.messages import Action, Message
    from agent_r1.core.task import Task
    from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn

    coin = random.Random(0)

    def attempt(group: int, member: int) -> Trajectory:
        ids = tuple(coin.randrange(vocabulary) for _ in range(context))
        start = context // 8
        turn = Turn(
            index=0,
            parent=None,
            new_ids=ids[:start],
            action_ids=ids[start:],
            logprobs=(-1.0,) * (context - start),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(""), ""),
        )
        name = f"task-{group}"
        return Trajectory(
            AttemptId("run", name, group, member), name, (turn,), Status.COMPLETED, False, {"r": coin.random()}
        )

    for group in range(config.groups_per_step):
        attempts = tuple(attempt(group, member) for member in range(config.group_size))
        yield Group(group, Task(f"task-{group}", ()), attempts)


def resident(key: str) -> int:
    """Return a size of this process in bytes: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measure(case: Case) -> None:
    """Take two updates and print estimate and peak in bytes."""
    from agent_r1.config import Layer, resolve
    from agent_r1.inference.torch_engine import TorchEngine
    from agent_r1.model.adapter import add_adapter, copy_sharing_frozen, merged_copy
    from agent_r1.model.weights import cast_parameters
    from agent_r1.trainer.single_process import SingleProcessTrainer
    from agent_r1.trainer.updater import PolicyUpdater
    from agent_r1.training.checkpoint_files import weights_on_cpu
    from agent_r1.training.config import TrainConfig
    from agent_r1.training.memory_estimate import plan_memory

    settings = {"model": "any", "groups_per_step": 4, "group_size": 2, "trainer.micro_tokens": 2048, **case.settings}
    config = resolve(TrainConfig, [Layer("benchmark", settings)])
    model, context = make_model(case.model), case.context
    if config.trainer.lora.rank:
        cast_parameters(model, config.trainer.dtype)
        add_adapter(model, config.trainer.lora, seed=0, base="")
    plan = plan_memory(model, config, context, 10**12)
    CLEAR.write_text("5", "utf-8")  # the peak begins here
    before = resident("VmRSS")
    trainer = SingleProcessTrainer(model, config.algorithm, config.trainer, temperature=1.0)
    updater = PolicyUpdater(trainer, config.algorithm, config.trainer, reward_weights={}, seed=0, steps=2)
    engine = TorchEngine(copy_sharing_frozen(model), context, config.engine)
    runner = engine._runner
    block = runner.blocks[runner.add_block()]
    heads = torch_empty(model, runner, context)
    for layer in range(model.config.num_hidden_layers):
        block.layer(layer, heads)
    block.reserve(context)
    for tensor in (*block.keys, *block.values):
        tensor.fill_(1)  # memory counts once it is written to

    async def take_updates() -> None:
        saved: list[Any] = []
        for _ in range(2):
            groups = list(random_groups(config, context, model.config.vocab_size))
            await updater.update([updater.select(group) for group in groups])
            if config.checkpoint_every:
                saved[:] = [weights_on_cpu(model), updater.state()]

    asyncio.run(take_updates())
    if config.trainer.lora.rank:
        merged_copy(model)
    print("found", plan.total, resident("VmHWM") - before, plan)


def torch_empty(model: Any, runner: Any, context: int) -> Any:
    """Return a tensor with the shape of a layer's keys."""
    import torch

    heads, size = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    dtype = runner.model.dtype if runner._native is None else torch.float32
    return torch.empty(1, heads, 1, getattr(model.config, "head_dim", None) or size, dtype=dtype)


def main() -> None:
    """Measure every case in a process of its own and print the table."""
    table = Table("run", "estimate MiB", "peak MiB", "ratio")
    for name in sys.argv[1:] or CASES:
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, encoding="utf-8")
        line = next((line for line in done.stdout.splitlines() if line.startswith("found")), None)
        if line is None:
            print(done.stdout[-1000:], done.stderr[-2000:], flush=True)
            continue
        estimate, peak = map(int, line.split()[1:3])
        print(name, line, flush=True)
        table.add_row(name, f"{estimate / MIB:,.0f}", f"{peak / MIB:,.0f}", f"{estimate / peak:.2f}")
    Console().print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        measure(CASES[sys.argv[2]])
    else:
        main()
