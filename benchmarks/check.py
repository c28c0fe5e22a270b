"""Fail if the framework has become slower: compare ratios of speed with the last ones in benchmarks/ratios.json.

    make bench-check
    python benchmarks/check.py --record     # the first record of a processor

Each ratio is the CPU seconds of a fixed baseline divided by ours, for the same work, in turns in one process. So it
depends little on how busy the machine is, but it depends on the processor. Only records of processors with the same
name are compared. The baselines are plain PyTorch code that does not change.

Exit code 0: no ratio has lost more than 20 %, and the ratios are added to the file, under the current commit. Exit code
1: a ratio has lost more. Exit code 2: the file has no record of this processor, so nothing was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from decode import random_llama, runners_of, step_seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.inference import Dtype, PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.model.forward import token_scores
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.servers import processor_name

RATIOS = Path(__file__).parent / "ratios.json"
LOSS = 0.2
"""The share of a ratio that may be lost."""


@dataclass(frozen=True)
class Machine:
    """The machine of a record. Records are compared if their processors are equal."""

    processor: str
    cores: int
    python: str
    torch: str


@dataclass(frozen=True)
class Record:
    """The ratios of a commit on a machine, by name: CPU seconds of the baseline divided by ours."""

    commit: str
    machine: Machine
    ratios: Mapping[str, float]


def find_losses(last: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return a line for each ratio that has lost more than ``LOSS`` since ``last``, or is missing now."""
    lines = []
    for name, before in last.items():
        if name not in now:
            lines.append(f"{name}: {before:.2f} before, not measured now")
        elif now[name] < (1 - LOSS) * before:
            lines.append(f"{name}: {before:.2f} before, {now[name]:.2f} now")
    return lines


def read_records(file: Path) -> list[Record]:
    records = json.loads(file.read_text("utf-8")) if file.exists() else []
    return [Record(record["commit"], Machine(**record["machine"]), record["ratios"]) for record in records]


def last_record(file: Path, machine: Machine, commit: str) -> Record | None:
    """Return the last record of the machine's processor in ``file``; None if there is none.

    Records of other commits than ``commit`` come first, so that a commit is not compared with itself.
    """
    found = [each for each in read_records(file) if each.machine.processor == machine.processor]
    return max(found, key=lambda each: (each.commit != commit, found.index(each)), default=None)


def add_record(file: Path, record: Record) -> None:
    """Add a record to ``file``. It replaces a record of the same commit and processor."""

    def is_other(other: Record) -> bool:
        return (other.commit, other.machine.processor) != (record.commit, record.machine.processor)

    records = [*filter(is_other, read_records(file)), record]
    file.write_text(json.dumps([asdict(each) for each in records], indent=1) + "\n", "utf-8")


def ratio_of(baseline: Callable[[], float], ours: Callable[[], float], repeats: int) -> float:
    """Return the median ratio of the seconds of two functions, which take turns. The first turn is a warm-up."""
    pairs = [(baseline(), ours()) for _ in range(repeats + 1)][1:]
    return statistics.median(one / other for one, other in pairs)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def groups_of(size: int, prompt_length: int) -> list[Group]:
    """Return groups of ``size`` attempts with equal prompts, random actions and random rewards."""
    numbers = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(4096) for _ in range(count))

    def attempt(group: int, member: int, prompt: tuple[int, ...]) -> Trajectory:
        turn = Turn(
            index=0, parent=None, new_ids=prompt, action_ids=tokens(32), logprobs=(-8.0,) * 32,
            version_spans=(PolicyVersionSpan(0, 0),), rewards={}, finish_reason="stop",
            action=Action(Message.assistant(""), ""),
        )  # fmt: skip
        rewards = {"score": numbers.random()}
        name = AttemptId("run", f"task-{group}", group, member)
        return Trajectory(name, name.task, (turn,), Status.COMPLETED, False, rewards, None, ())

    made = []
    for group in range(2):
        prompt = tokens(prompt_length)
        attempts = tuple(attempt(group, member, prompt) for member in range(size))
        made.append(Group(group, Task(f"task-{group}", ()), attempts, None))
    return made


def padded_update(model: PreTrainedModel, groups: Sequence[Group]) -> None:
    """Take an optimizer step on one padded batch, with the logits of all positions."""
    turns = [trajectory.turns[0] for group in groups for trajectory in group.trajectories]
    ids = pad_sequence([torch.tensor(turn.new_ids + turn.action_ids) for turn in turns], batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    logits = model(input_ids=ids).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[:, :, 0]
    actions = len(turns[0].action_ids)
    (-chosen[:, -actions:].mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def update_ratio(repeats: int) -> float:
    """Return the ratio of updates: on one padded batch, and ours, which computes shared prefixes once."""
    model, groups = random_llama("0.5M"), groups_of(8, prompt_length=128)
    algorithm, config = build_algorithm("grpo", {}), TrainerConfig(share_prefixes="on", micro_tokens=4096)

    def ours() -> float:
        trainer = SingleProcessTrainer(model, algorithm, config, temperature=1.0)
        updater = PolicyUpdater(trainer, algorithm, config, reward_weights={}, seed=0, steps=1000)
        selected = [updater.select(group) for group in groups]
        return cpu_seconds(lambda: asyncio.run(updater.update(selected)))

    return ratio_of(lambda: cpu_seconds(lambda: padded_update(model, groups)), ours, repeats)


def decode_ratio(dtype: Dtype, repeats: int) -> float:
    """Return the ratio of decode steps of 16 rows: PyTorch's, and the engine's."""
    runners = runners_of("0.5M", context=128)
    return ratio_of(
        lambda: step_seconds(runners[f"PyTorch, {dtype}"], 16, steps=25),
        lambda: step_seconds(runners[f"native, {dtype}"], 16, steps=25),
        repeats,
    )


def scores_ratio(repeats: int) -> float:
    """Return the ratio of log-probabilities and entropies of actions, with their gradient."""
    model = random_llama("0.5M")
    hidden, targets = torch.randn(1024, 64, requires_grad=True), torch.randint(0, 4096, (1024,))

    def plain() -> Tensor:
        table = model.get_output_embeddings()(hidden).log_softmax(-1)
        with torch.no_grad():
            (table.exp() * table).sum(-1)
        return table.gather(-1, targets[:, None]).sum()

    return ratio_of(
        lambda: cpu_seconds(lambda: plain().backward()),
        lambda: cpu_seconds(lambda: token_scores(model, hidden, targets, 1.0)[0].sum().backward()),
        repeats,
    )


RATIO_OF: Mapping[str, Callable[[int], float]] = {
    "update / one padded batch": update_ratio,
    "decode step / PyTorch's whole block": partial(decode_ratio, "float32"),
    "decode step in bfloat16 / PyTorch's whole block": partial(decode_ratio, "bfloat16"),
    "scores of actions / plain operations": scores_ratio,
}


def keep_freed_memory() -> None:
    """Let glibc keep freed tensors for the next ones. Do nothing with other C libraries.

    By default, glibc gives large freed tensors back to the operating system, which clears each page again for the next
    tensor. Which ones depends on the addresses of the process: the baseline of ``scores_ratio`` took 48 ms in some
    processes and 66 ms in others, and takes 30 ms if glibc keeps freed tensors.
    """
    if platform.libc_ver()[0] == "glibc":
        (mmap_threshold, trim_threshold), library = (-3, -1), ctypes.CDLL(None)  # numbers of glibc's malloc.h
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)


def current_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()


def current_machine() -> Machine:
    return Machine(processor_name(), os.cpu_count() or 1, platform.python_version(), torch.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--file", type=Path, default=RATIOS, help="the ratios of earlier commits")
    parser.add_argument("--record", action="store_true", help="record the ratios without a comparison")
    options = parser.parse_args()
    commit, machine = current_commit(), current_machine()
    last = None if options.record else last_record(options.file, machine, commit)
    if last is None and not options.record:
        print(
            f"{options.file} has no record of this processor, {machine.processor}; to make one, check out the commit "
            "to compare with, and run 'python benchmarks/check.py --record'",
            file=sys.stderr,
        )
        sys.exit(2)
    torch.set_num_threads(1)
    keep_freed_memory()
    ratios = {name: round(measure(options.repeats), 3) for name, measure in RATIO_OF.items()}
    table = Table("ours / baseline", "ratio", "last recorded")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f}", "" if last is None else f"{last.ratios.get(name, 0):.2f}")
    Console().print(table)
    losses = [] if last is None else find_losses(last.ratios, ratios)
    if last is not None and losses:
        sys.exit("\n".join([f"more than {LOSS:.0%} slower than {last.commit} on {machine.processor}:", *losses]))
    add_record(options.file, Record(commit, machine, ratios))


if __name__ == "__main__":
    main()
