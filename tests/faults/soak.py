"""A soak test: the real training loop runs for a long time with random faults; resources must not grow.

    python tests/faults/soak.py                   20 minutes
    python tests/faults/soak.py --minutes 480
    python tests/faults/soak.py --staleness 1 --stops 3     stale rollouts, stopped and resumed
    python tests/faults/soak.py --algorithm remax           with a greedy attempt in each group
    python tests/faults/soak.py --minutes 1 --leak      the control: attempts leak memory and files
    python tests/faults/soak.py --steps 3 --patient         short, and independent of the machine's speed

Each tool call, opening, step, closing, scoring and generation fails with the same probability (``--rate``), drawn from
the seed and the position in the run; one update in twenty gets a NaN gradient. Exit code 1 if a resource grows, a step
hangs, or an invariant does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from random_faults import Faults, hostile_engine, hostile_forward_backward, hostile_taskset
from rich.console import Console
from rich.table import Table

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import AgentR1Error, Interrupted, RunStopped
from agent_r1.core.taskset import TaskSet
from agent_r1.store.folder import is_run
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import VerificationReport, verify
from agent_r1.tools.execution import MAX_THREADS
from agent_r1.training import build as services, run
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress, StepReport
from agent_r1.training.resume import resolve_resume_config

SETTINGS: Mapping[str, Any] = {
    "steps": 10**6,  # the run is ended by its time limit
    "group_size": 16,
    "evaluate_every": 20,
    "evaluate_n": 16,
    "pass_k": 0,
    "checkpoint_every": 10,
    "concurrency": 64,
}


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds: of an episode, of its scoring, and of a step until it counts as stuck."""

    episode: float
    scoring: float
    step: float


PATIENT = TimeLimits(episode=600.0, scoring=600.0, step=600.0)

MIB_PER_THOUSAND = 1.0
"""Allowed growth of memory per 1,000 rollouts, in MiB."""

WARMUP_ROLLOUTS = 3000
"""Growth is not judged before this many rollouts."""

MORE_FILES, MORE_THREADS = 3, MAX_THREADS + 16
BLOCKS, STUDENT_95 = 20, 2.101
"""Samples are averaged in blocks, because neighbors are not independent; the quantile of t fits their number."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources of the process, ``seconds`` after the start."""

    seconds: float
    mib: float
    files: int
    threads: int


class SoakIsOver(AgentR1Error):
    """The soak has trained for its minutes, or for its steps."""


class ResourceWatch(SilentProgress):
    """Samples the resources of the process from the first step on, and ends the run after its time or its steps."""

    def __init__(self, seconds: float, steps: int, stops: int) -> None:
        self._seconds, self._began = seconds, time.monotonic()  # counted from the first step on
        self._limit = steps
        self._stops = [(number + 1) / (stops + 1) for number in range(stops)]
        self.samples: list[Sample] = []
        self.steps: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_repeatedly, daemon=True)

    def on_step(self, report: StepReport) -> None:
        self.steps.append(time.monotonic() - self._began)
        self.samples.append(self._sample())
        if len(self.steps) == 1:
            self._thread.start()
        passed = max((self.steps[-1] - self.steps[0]) / self._seconds, len(self.steps) / self._limit)
        if self._stops and passed > self._stops[0]:
            del self._stops[0]
            os.kill(os.getpid(), signal.SIGTERM)
        elif passed >= 1:
            raise SoakIsOver("the minutes or the steps are over")

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample_repeatedly(self) -> None:
        while not self._over.wait(self._seconds / 400):
            self.samples.append(self._sample())

    def _sample(self) -> Sample:
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return Sample(time.monotonic() - self._began, mib, len(os.listdir("/proc/self/fd")), threading.active_count())

    @property
    def warm(self) -> list[Sample]:
        """The samples of the last three quarters of the run."""
        return self.samples[len(self.samples) // 4 :]

    @property
    def longest(self) -> float:
        """The longest time between two steps, in seconds."""
        return max(after - before for before, after in itertools.pairwise([0.0, *self.steps]))


@dataclass(frozen=True, slots=True)
class Slope:
    """A growth per second with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Slope:
        return Slope(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.value:+.2f} (95 %: {self.low:+.2f} to {self.high:+.2f})"


def slope_of(points: Sequence[tuple[float, float]]) -> Slope:
    """Return the least-squares slope through the means of ``BLOCKS`` blocks of points (x, y)."""
    size = len(points) / BLOCKS
    blocks = [points[round(n * size) : round((n + 1) * size)] for n in range(BLOCKS)]
    xs, ys = ([statistics.fmean(point[axis] for point in block) for block in blocks] for axis in (0, 1))
    line = statistics.linear_regression(xs, ys)
    residuals = (y - line.slope * x - line.intercept for x, y in zip(xs, ys, strict=True))
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    error = (sum(r * r for r in residuals) / (BLOCKS - 2) / spread) ** 0.5
    return Slope(line.slope, line.slope - STUDENT_95 * error, line.slope + STUDENT_95 * error)


@dataclass(frozen=True, slots=True)
class SoakResult:
    """The result of a soak. ``megabytes`` is the size of ``run.db``."""

    watch: ResourceWatch
    limits: TimeLimits
    error: AgentR1Error
    faults: Faults
    report: VerificationReport
    statuses: Mapping[str, int]
    checkpoints: int
    megabytes: float

    @property
    def rollouts(self) -> int:
        return sum(self.statuses.values())

    @property
    def slope(self) -> Slope | None:
        """MiB per second; None if the run is too short to judge."""
        if self.rollouts <= WARMUP_ROLLOUTS or len(self.watch.warm) < 2 * BLOCKS:
            return None
        return slope_of([(sample.seconds, sample.mib) for sample in self.watch.warm])

    @property
    def per_thousand(self) -> Slope | None:
        """MiB per 1,000 rollouts; None if the run is too short to judge."""
        return self.slope and self.slope * (1000 * self.watch.steps[-1] / self.rollouts)

    def violations(self) -> Iterator[str]:
        yield from self.report.violations
        if not isinstance(self.error, SoakIsOver):
            yield f"the run ended: {self.error}"
        if self.per_thousand is not None and self.per_thousand.low > MIB_PER_THOUSAND:
            yield f"memory grows by {self.per_thousand} MiB per 1,000 rollouts"
        more = self.watch.samples[-1].files - self.watch.samples[0].files
        if more > MORE_FILES:
            yield f"{more:g} more files are open"
        if self.watch.warm[-1].threads > self.watch.samples[0].threads + MORE_THREADS:
            yield f"{self.watch.warm[-1].threads} threads"
        if self.watch.longest > self.limits.step:
            yield f"a step took {self.watch.longest:.0f} s"


def train_until_time_is_up(folder: Path, config: TrainConfig, taskset: TaskSet, watch: ResourceWatch) -> AgentR1Error:
    """Train, resume after each stop by a signal, and return the error that ended the run."""
    place = Layer("soak", {"run": str(folder)})
    while True:
        try:
            if is_run(folder):
                run.resume(resolve_resume_config([place]), taskset, watch)
            else:
                run.train(config, taskset, watch)
            return AgentR1Error("all steps were taken")
        except Interrupted:
            continue
        except (SoakIsOver, RunStopped) as raised:
            return raised


def soak(options: argparse.Namespace, folder: Path) -> SoakResult:
    torch.set_num_threads(1)
    limits = PATIENT if options.patient else TimeLimits(options.deadline, scoring=0.5, step=60.0)
    faults = Faults(options.rate, options.seed, options.leak, hanging=not options.patient)
    watch = ResourceWatch(60 * options.minutes, options.steps, options.stops)
    taskset = hostile_taskset(faults)
    asked = {
        "max_staleness": options.staleness,
        "algorithm": options.algorithm,
        "seed": options.seed,
        "groups_per_step": options.groups,
    }
    times = {"episode_seconds": limits.episode, "score_seconds": limits.scoring}
    layer = Layer("soak", {**SETTINGS, **asked, **times, "run": str(folder)})
    config = resolve(TrainConfig, [layer, Layer("recipe", taskset.recipe)])
    logging.getLogger("agent_r1").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(patch.object(services, "TorchEngine", hostile_engine(faults)))
        stack.enter_context(patch("agent_r1.trainer.single_process.forward_backward", hostile_forward_backward(faults)))
        try:
            error = train_until_time_is_up(folder, config, taskset, watch)
        finally:
            watch.stop()
    with closing(RunReader(folder)) as reader:
        statuses = Counter(str(trajectory.status) for trajectory in reader.trajectories())
    checkpoints = len(list((folder / "checkpoints").glob("step-*")))
    return SoakResult(
        watch, limits, error, faults, verify(folder), statuses, checkpoints, (folder / "run.db").stat().st_size / 1e6
    )


def table_of(soaked: SoakResult) -> Table:
    watch, fates = soaked.watch, soaked.report.attempts
    start, warm, end = watch.samples[0], watch.warm[0], watch.samples[-1]
    table = Table("quantity", "value", title=f"{watch.steps[-1] / 60:.1f} minutes, {len(watch.steps)} steps")
    table.add_row("faults", f"{soaked.faults.fired.total():,}")
    for kind, count in sorted(soaked.faults.fired.items()):
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("rollouts", f"{soaked.rollouts:,}")
    for status, count in sorted(soaked.statuses.items()):
        table.add_row(f"  {status}", f"{count:,}")
    table.add_row("memory, MiB: first step, warm, end", f"{start.mib:.0f}, {warm.mib:.0f}, {end.mib:.0f}")
    table.add_row("memory, MiB per hour", str((soaked.slope and soaked.slope * 3600) or "too short to judge"))
    table.add_row("memory, MiB per 1,000 rollouts", str(soaked.per_thousand or "too short to judge"))
    table.add_row("open files: first step, warm, end", f"{start.files}, {warm.files}, {end.files}")
    table.add_row("threads: first step, warm, end", f"{start.threads}, {warm.threads}, {end.threads}")
    table.add_row("longest step, s", f"{watch.longest:.1f}")
    table.add_row("checkpoints; run.db, MB", f"{soaked.checkpoints}; {soaked.megabytes:.1f}")
    table.add_row("segments", f"{soaked.report.segments}")
    table.add_row("invariants", f"{'hold' if soaked.report.is_valid else 'BROKEN'}: {dict(fates)}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=10**6, help="the soak ends earlier, after this many steps")
    parser.add_argument("--groups", type=int, default=8, help="groups of 16 attempts per step")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--deadline", type=float, default=8.0, help="time limit of an episode in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0, help="steps that attempts may be sampled ahead")
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument(
        "--stops", type=int, default=0, help="number of times the run is stopped by a signal and resumed"
    )
    parser.add_argument("--leak", action="store_true")
    parser.add_argument(
        "--patient", action="store_true", help="no hanging steps or scorings; long time limits, for a loaded machine"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "soak"
        soaked = soak(options, place)
    Console(width=120).print(table_of(soaked))
    violations = list(soaked.violations())
    print("\n".join(violations) or f"holds; seed {options.seed}, rate {options.rate}")
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
