"""Every algorithm on a micro-world: does it run without a NaN, and does the reward rise?

    make algorithms                             every row (minutes)
    python benchmarks/algorithms.py --only gspo      one row

The micro-world is TinyWiki in small: 8 questions a step, 8 attempts each, 15 steps from tiny-base. A successful call of
the search tool earns a little, so that rows with process rewards have some.
Exit code 1 where a row has a number that is not finite, or a reward that does not rise.
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
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

STEPS = 15
MICRO: Mapping[str, Any] = {
    "steps": STEPS,
    "groups_per_step": 8,
    "group_size": 8,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "reward_weights.found": 0.1,
}
"""Settings of every run. Evaluation is left out but for one question."""

FIRST = LAST = 4
"""Steps at either end whose mean rewards are compared."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "distillation": {"teacher": "TEACHER"},
    "vapo": {"algorithm.advantage.alpha": 1.0},
    "echo": {"algorithm.observation_nll_coef": 0.01},
}
"""What a row is given beside its defaults. TEACHER is the model that grpo made. VAPO's lambda is made for answers of
thousands of tokens: these have twenty, where its alpha of 0.05 makes lambda 0. What TinyWiki's pages say is drawn at
random, so that learning to say it, at ECHO's 0.1, drowns the rest."""

RISE = 0.1
"""A smaller difference is no rise: the mean of 256 attempts has a standard error of about 0.03."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run: seconds, the reward of each step, and what was not finite."""

    seconds: float
    rewards: tuple[float, ...]
    broken: tuple[str, ...]

    @property
    def first(self) -> float:
        return statistics.fmean(self.rewards[:FIRST])

    @property
    def last(self) -> float:
        return statistics.fmean(self.rewards[-LAST:])

    @property
    def good(self) -> bool:
        return not self.broken and self.rises

    @property
    def rises(self) -> bool:
        return self.last > self.first + RISE


def run(name: str, folder: Path, teacher: str) -> Result:
    """Train by the row ``name``; its run stands in ``folder``."""
    taskset = build("tinywiki", None, None, 0)
    settings = {key: teacher if value == "TEACHER" else value for key, value in SETTINGS.get(name, {}).items()}
    # used twice, so that ratios leave 1 and the bounds on them act; a plain policy gradient is right for once only
    reuse = {"trainer.minibatches": 2 if ALGORITHMS[name].loss.uses_ratio else 1}
    wanted = {**MICRO, **reuse, **settings, "algorithm": name, "run": str(folder)}
    config = resolve(TrainConfig, [Layer("rows", wanted), Layer("recipe of tinywiki", taskset.recipe)])
    began = time.perf_counter()
    train(config, taskset, SilentProgress())
    seconds = time.perf_counter() - began
    reader = RunReader(folder)
    measured = list(reader.metrics())
    reader.close()
    broken = {
        f"{key} at step {one.step}" for one in measured for key, value in one.values.items() if _broken(key, value)
    }
    return Result(seconds, tuple(one.values["reward"] for one in measured), tuple(sorted(broken)))


def _broken(key: str, value: float) -> bool:
    return not math.isfinite(value) or (key == "skipped_steps" and value > 0)


def results(names: list[str]) -> Iterator[tuple[str, Result]]:
    """Each row's result, as soon as it is there."""
    with tempfile.TemporaryDirectory() as place:
        teacher = Path(place) / "grpo"
        if "distillation" in names and "grpo" not in names:
            run("grpo", teacher, "")
        for name in names:
            yield name, run(name, Path(place) / name, str(teacher / "model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(ALGORITHMS), nargs="+", default=list(ALGORITHMS))
    console = Console(width=110)
    table = Table("row", "seconds", f"reward, first {FIRST} steps", f"last {LAST}", "rises", "not finite")
    failed = False
    began = time.perf_counter()
    for name, result in results(parser.parse_args().only):
        failed |= not result.good
        cells = (f"{result.seconds:.1f}", f"{result.first:.3f}", f"{result.last:.3f}")
        table.add_row(name, *cells, "yes" if result.rises else "NO", ", ".join(result.broken) or "-")
        print(f"{name} {' '.join(cells)}", file=sys.stderr, flush=True)
    console.print(table)
    console.print(f"{len(table.rows)} rows in {time.perf_counter() - began:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
