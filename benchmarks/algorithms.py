"""Train every algorithm on a small task: is every number finite, and does the reward rise?

    make algorithms                                  all algorithms (minutes)
    python benchmarks/algorithms.py --only gspo      one algorithm

The task is a small TinyWiki: 8 questions per step, 8 attempts each, 15 steps. A successful call of the search tool
has a small reward, so that algorithms with process rewards have some. The runs begin with the model of the golden
record, to which the right strategy is not new: 15 such steps teach tiny-base little.
The exit code is 1 if an algorithm has a number that is not finite, or a reward that does not rise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

STEPS = 15
GOLDEN_BASE = Path(__file__).parents[1] / "tests" / "golden" / "base"
SMALL: Mapping[str, Any] = {
    "model": str(GOLDEN_BASE),
    "steps": STEPS,
    "trainer.learning_rate": 3e-4,
    "groups_per_step": 8,
    "group_size": 8,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "reward_weights.found": 0.1,
}
"""Settings of every run. Evaluation is limited to one question."""

FIRST = LAST = 4
"""Number of first and last steps whose mean rewards are compared."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "distillation": {"teacher": "TEACHER"},
    "top-k-distillation": {"teacher": "TEACHER"},
    "vapo": {"algorithm.advantage.alpha": 1.0},
    "echo": {"algorithm.observation_nll_coef": 0.01},
}
"""Further settings by algorithm.

TEACHER is the model that grpo trained. VAPO's lambda is meant for answers of thousands of tokens: these have twenty,
for which its alpha of 0.05 gives lambda 0. The content of TinyWiki's pages is random: with ECHO's default coefficient
of 0.1 the loss on it would dominate."""

RISE = 0.1
"""Least increase that counts: the mean of 256 attempts has a standard error of about 0.03."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run: seconds, the reward of each step, and the metrics that were not finite."""

    seconds: float
    rewards: tuple[float, ...]
    not_finite: tuple[str, ...]

    @property
    def first(self) -> float:
        return statistics.fmean(self.rewards[:FIRST])

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def passed(self) -> bool:
        return not self.not_finite and self.rises

    @property
    def rises(self) -> bool:
        return self.last > self.first + RISE


def make_config(name: str, taskset: TaskSet, folder: Path, teacher: str) -> TrainConfig:
    """Return the settings with which the algorithm ``name`` is trained, in the run folder ``folder``."""
    settings = {key: teacher if value == "TEACHER" else value for key, value in SETTINGS.get(name, {}).items()}
    # Batches are used twice, so that ratios differ from 1 and clipping acts. A plain policy gradient is right only for
    # on-policy samples.
    reuse = {"trainer.minibatches": 2 if ALGORITHMS[name].loss.uses_ratio else 1}
    chosen = {**SMALL, **reuse, **settings, "algorithm": name, "run": str(folder)}
    return resolve(TrainConfig, [Layer("benchmark", chosen), Layer("recipe of tinywiki", taskset.recipe)])


def run(name: str, folder: Path, teacher: str) -> Result:
    """Train with the algorithm ``name``, in the run folder ``folder``."""
    taskset = build("tinywiki", None, None, 0)
    config = make_config(name, taskset, folder, teacher)
    started = time.perf_counter()
    train(config, taskset, SilentProgress())
    seconds = time.perf_counter() - started
    reader = RunReader(folder)
    steps = list(reader.metrics())
    reader.close()
    failures = {
        f"{key} at step {step.step}" for step in steps for key, value in step.values.items() if _is_failure(key, value)
    }
    return Result(seconds, tuple(step.values["reward"] for step in steps), tuple(sorted(failures)))


def _is_failure(key: str, value: float) -> bool:
    return not math.isfinite(value) or (key == "skipped_steps" and value > 0)


def results(names: list[str]) -> Iterator[tuple[str, Result]]:
    """Yield the result of each algorithm as soon as its run ends."""
    with tempfile.TemporaryDirectory() as folder:
        teacher = Path(folder) / "grpo"
        if {"distillation", "top-k-distillation"} & set(names) and "grpo" not in names:
            run("grpo", teacher, "")
        for name in names:
            yield name, run(name, Path(folder) / name, str(teacher / "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(ALGORITHMS), nargs="+", default=list(ALGORITHMS))
    console = Console(width=110)
    table = Table("algorithm", "seconds", f"reward, first {FIRST} steps", f"last {LAST}", "rises", "not finite")
    failed = False
    started = time.perf_counter()
    for name, result in results(parser.parse_args().only):
        failed |= not result.passed
        cells = (f"{result.seconds:.1f}", f"{result.first:.3f}", f"{result.last:.3f}")
        table.add_row(name, *cells, "yes" if result.rises else "NO", ", ".join(result.not_finite) or "-")
        print(f"{name} {' '.join(cells)}", file=sys.stderr, flush=True)
    console.print(table)
    console.print(f"{len(table.rows)} algorithms in {time.perf_counter() - started:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
