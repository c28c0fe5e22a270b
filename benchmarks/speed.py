"""Measure the speed of sampling and training on this machine; ratios are measured side by side in one run.

    make bench

Sampling: tokens per second of the embedded engine, compared with ``transformers.generate``, which computes the whole
conversation again at each turn, with the same agent loop and prompts. Measured on TinyWiki's episodes with tiny-base
(actions of about nine tokens), and on episodes of exactly three turns with actions of up to 32 tokens, with the same
architecture and random weights (which rarely sample an end token), after a short or a long page.
Training: tokens per second of the trainer on the trajectories just collected, compared with the same update on one
padded batch. Then the seconds of a training step by phase, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.config import Layer, resolve
from agent_r1.core.environment import Env, RolloutContext, Transition
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Group
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.config import TrainConfig
from agent_r1.training.environments import rollout_limits
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.policy import Policy, load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

GATHER_SECONDS = 0.02


@dataclass(slots=True)
class PendingRequest:
    prompt: Prompt
    sampling: SamplingParams
    future: asyncio.Future[Completion]


class GenerateEngine:
    """``transformers.generate`` on all waiting requests, left-padded, without a KV cache across turns."""

    capabilities = Capabilities(transports=frozenset())

    def __init__(self, model: PreTrainedModel, pad: int) -> None:
        self._model, self._pad = model, pad
        self._waiting: list[PendingRequest] = []
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        waiting = PendingRequest(prompt, params, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await waiting.future

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        raise EngineError("this engine keeps the weights it was made with")

    async def release(self, session_id: str) -> None:
        return None

    async def close(self) -> None:
        return None

    async def _drive(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        batch, self._waiting = self._waiting, []
        for waiting, completion in zip(batch, await asyncio.to_thread(self._generate, batch), strict=True):
            waiting.future.set_result(completion)
        if self._waiting:
            self._driver = asyncio.create_task(self._drive())

    @torch.inference_mode()
    def _generate(self, batch: Sequence[PendingRequest]) -> list[Completion]:
        longest = max(len(waiting.prompt.token_ids) for waiting in batch)
        ids = torch.full((len(batch), longest), self._pad)
        mask = torch.zeros_like(ids)
        for row, waiting in enumerate(batch):
            ids[row, longest - len(waiting.prompt.token_ids) :] = torch.tensor(waiting.prompt.token_ids)
            mask[row, longest - len(waiting.prompt.token_ids) :] = 1
        sampling = batch[0].sampling
        out = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(sampling.stop_token_ids),
            pad_token_id=self._pad,
        )
        return [_completion(row.tolist(), sampling) for row in out[:, longest:]]


def _completion(ids: list[int], sampling: SamplingParams) -> Completion:
    ends = [index for index, token in enumerate(ids) if token in sampling.stop_token_ids]
    kept = tuple(ids[: ends[0] + 1] if ends else ids)
    return Completion(kept, (0.0,) * len(kept), "stop" if ends else "length", (PolicyVersionSpan(0, 0),))


def sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(len(turn.action_ids) for group in groups for t in group.trajectories for turn in t.turns)


PAGE = "Alaban: capital Brodra. river Corimis. mayor Dovuban. twin Elamis. rival Fenedra. founder Garimis. "


@dataclass(slots=True)
class ThreeTurns:
    """An environment that shows a text after each of two actions and ends after the third."""

    shown: str
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> ThreeTurnsEpisode:
        return ThreeTurnsEpisode(task.messages, Message.user(self.shown))


@dataclass(slots=True)
class ThreeTurnsEpisode:
    start: tuple[Message, ...]
    shown: Message
    taken: int = 0

    async def step(self, action: Action) -> Transition:
        self.taken += 1
        return Transition((), end="terminal") if self.taken == 3 else Transition((self.shown,))

    async def close(self) -> None:
        return None


def random_weights(policy: Policy) -> Policy:
    """Return the policy with random weights."""
    torch.manual_seed(0)
    model = type(policy.model)(policy.model.config).eval()
    return replace(policy, model=model, context_length=model.config.max_position_embeddings)


def run_episodes(
    policy: Policy, env: Env, taskset: TaskSet, config: TrainConfig, engine: InferenceEngine
) -> tuple[float, list[Group]]:
    """Return the sampled tokens per second over the episodes of one training step, and the groups."""
    method = Method("bench", policy.agent(engine, config, config.temperature), env)
    tasks = taskset.tasks("train")[: config.groups_per_step]
    began = time.perf_counter()
    groups = asyncio.run(attempts(method, taskset.scorers, tasks, config.group_size, rollout_limits(config)))
    return sampled_tokens(groups) / (time.perf_counter() - began), groups


def engine_of(policy: Policy) -> TorchEngine:
    return TorchEngine(copy.deepcopy(policy.model), policy.context_length)


def median_of(repeat: int, measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeat))


def measure_sampling(
    name: str, policy: Policy, env: Env, taskset: TaskSet, config: TrainConfig, repeat: int
) -> tuple[Table, list[Group]]:
    pad = policy.tokenizer.pad_token_id
    _, groups = run_episodes(policy, env, taskset, config, engine_of(policy))
    ours = median_of(repeat, lambda: run_episodes(policy, env, taskset, config, engine_of(policy))[0])
    plain = median_of(repeat, lambda: run_episodes(policy, env, taskset, config, GenerateEngine(policy.model, pad))[0])
    trajectories = [t for group in groups for t in group.trajectories]
    turns = statistics.mean(len(t.turns) for t in trajectories)
    length = sampled_tokens(groups) / sum(len(t.turns) for t in trajectories)
    title = f"{name}: {len(trajectories)} episodes, {turns:.1f} turns, {length:.0f} tokens an action"
    table = Table("sampling", "tokens/s", "ratio", title=title)
    table.add_row("transformers.generate, prefilled again each turn", f"{plain:,.0f}", "1.0")
    table.add_row("embedded engine", f"{ours:,.0f}", f"{ours / plain:.1f}")
    return table, groups


def updater_of(model: PreTrainedModel, config: TrainConfig) -> PolicyUpdater:
    trainer = SingleProcessTrainer(model, config.algorithm, config.trainer, temperature=config.temperature)
    weights = config.reward_weights
    return PolicyUpdater(
        trainer, config.algorithm, config.trainer, reward_weights=weights, seed=config.seed, steps=config.steps
    )


def final_states(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Return the whole sequence of each episode: its last prompt and action."""
    trajectories = [t for group in groups for t in group.trajectories if t.turns]
    return [t.prompt_ids(t.turns[-1]) + t.turns[-1].action_ids for t in trajectories]


def padded_update(model: PreTrainedModel, rows: Sequence[tuple[int, ...]]) -> None:
    """Take one optimizer step on one padded batch, with the logits of every position."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    logits = model(ids, attention_mask=mask.long()).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[:, :, 0]
    (-(chosen * mask[:, 1:]).sum() / mask.sum()).backward()
    optimizer.step()


def measure_training(policy: Policy, config: TrainConfig, groups: Sequence[Group], repeat: int) -> Table:
    """Return the tokens per second of one update, including prompts and observations."""
    rows = final_states(groups)
    tokens = sum(map(len, rows))
    preset = config.model_copy(update={"algorithm": build_algorithm(config.algorithm.name, {})})
    updater = updater_of(copy.deepcopy(policy.model), preset)

    def update() -> None:
        asyncio.run(updater.update([updater.select(group) for group in groups]))

    model = copy.deepcopy(policy.model)
    padded = tokens / median_of(repeat, lambda: seconds_of(lambda: padded_update(model, rows)))
    ours = tokens / median_of(repeat, lambda: seconds_of(update))
    table = Table("training", "tokens/s", "ratio", title=f"{len(rows)} episodes, {tokens:,} tokens")
    table.add_row("one padded batch, all logits", f"{padded:,.0f}", "1.0")
    table.add_row("the trainer", f"{ours:,.0f}", f"{ours / padded:.1f}")
    return table


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_phases(config: TrainConfig, taskset: TaskSet, steps: int) -> Table:
    """Return the seconds per training step by phase, over a short run whose first step is a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {"run": f"{folder}/bench", "steps": steps, "evaluate_n": 1, "evaluate_every": 0, "pass_k": 0}
        train(config.model_copy(update=changes), taskset, SilentProgress())
        with closing(RunReader(Path(folder) / "bench")) as reader:
            steps_measured = [step.values for step in reader.metrics()][1:]
    table = Table("phase of a step", "seconds")
    for phase in ("rollout", "update", "load", "monitor", "checkpoint"):
        table.add_row(phase, f"{statistics.median(values[f'{phase}_seconds'] for values in steps_measured):.4f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    taskset = build("tinywiki", None, None, 0)
    config = resolve(TrainConfig, [Layer("recipe of tinywiki", taskset.recipe)])
    torch.set_num_threads(config.threads)
    policy = load_policy(config, taskset)
    console = Console()
    table, groups = measure_sampling("TinyWiki", policy, taskset.env, taskset, config, options.repeat)
    console.print(table)
    untrained = random_weights(policy)
    for name, pages in (("3 turns, short page", 1), ("3 turns, long page", 9)):
        console.print(measure_sampling(name, untrained, ThreeTurns(pages * PAGE), taskset, config, options.repeat)[0])
    console.print(measure_training(policy, config, groups, options.repeat))
    console.print(measure_phases(config, taskset, options.steps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"threads {config.threads}, parameters {policy.model.num_parameters():,}, peak memory {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
