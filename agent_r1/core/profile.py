"""Measure how much time each part of a training step takes.

Parts that are active at the same time share the wall time. So the times of the parts add up to the time of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from time import perf_counter, process_time
from typing import Protocol


class Part(Enum):
    """A part of a training step. The value is the name of the part in tables and metrics."""

    GENERATION = "generation"
    """Decode steps of the embedded engine."""
    PREFILL = "prefill"
    """Forward passes over prompts and tool results in the embedded engine."""
    SAMPLING = "sampling"
    """Choice of tokens from logits, and search for stop strings."""
    SERVERS = "servers"
    """Requests to an engine outside of this process, and waiting for the answers."""
    TOOLS = "tools"
    """Work of environments, of their tools, and of agent programs."""
    REWARDS = "rewards"
    RENDERING = "rendering"
    """Conversion of messages to tokens, and of sampled tokens to messages."""
    PACKING = "packing"
    """Conversion of trajectories to micro-batches, with masks and advantages."""
    FORWARD = "forward"
    """Forward passes of the trainer, with the loss."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RANKS = "ranks"
    """Requests to a trainer that consists of several processes (ranks)."""
    PUBLISH = "publish"
    """Transfer of new weights to the engine."""
    STORE = "store"
    """Writing to the run's database, and copying of weights for checkpoints."""
    VALIDATION = "validation"
    """Validation, including its generation, tools and rewards."""
    WAITING = "waiting"
    """Moments in which this process computed nothing, and no other part was active."""
    OTHER = "other"
    """Moments in which this process computed something that belongs to no other part."""


_EXCLUSIVE = frozenset({Part.VALIDATION})
"""Parts that do not share time. While such a part is active, all time counts for this part, and none for the others."""

_IN_FLIGHT = frozenset({Part.SERVERS, Part.TOOLS, Part.REWARDS, Part.RANKS})
"""Parts that often only wait, for example for a server. While any other part is active, no time counts for these parts.
"""

SECONDS, CPU_SECONDS = "profile/", "profile_cpu/"
"""Prefixes of the names under which a run records the wall and CPU seconds of each part."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """The wall seconds of a part of a step, and the CPU seconds of the whole process in this time."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The time of each part of a step, or of an average step. ``parts`` is empty if nothing was measured.

    Example:
        StepProfile({Part.FORWARD: PartTime(0.2, 0.19), Part.OTHER: PartTime(0.01, 0.01)})
    """

    parts: Mapping[Part, PartTime]

    @property
    def total(self) -> PartTime:
        times = self.parts.values()
        return PartTime(sum(time.seconds for time in times), sum(time.cpu_seconds for time in times))

    def timings(self) -> dict[str, float]:
        """Return the profile as numbers by name, such as ``{"profile/forward": 0.2}``."""
        wall = {f"{SECONDS}{part.value}": time.seconds for part, time in self.parts.items()}
        return wall | {f"{CPU_SECONDS}{part.value}": time.cpu_seconds for part, time in self.parts.items()}

    @classmethod
    def from_timings(cls, timings: Mapping[str, float]) -> StepProfile:
        """Convert the result of :meth:`timings` back to a profile. Entries that belong to no Part are ignored."""
        parts = [part for part in Part if f"{SECONDS}{part.value}" in timings]
        return cls(
            {
                part: PartTime(timings[f"{SECONDS}{part.value}"], timings.get(f"{CPU_SECONDS}{part.value}", 0.0))
                for part in parts
            }
        )


def read_profiles(curves: Mapping[str, Mapping[int, float]]) -> list[StepProfile]:
    """Return the recorded profiles of a run, in the order of steps. ``curves`` is ``{name: {step: value}}``."""
    recorded = {name: curve for name, curve in curves.items() if name.startswith((SECONDS, CPU_SECONDS))}
    steps = sorted({step for curve in recorded.values() for step in curve})
    by_step = ({name: curve[step] for name, curve in recorded.items() if step in curve} for step in steps)
    return [StepProfile.from_timings(timings) for timings in by_step]


def mean_profile(profiles: Sequence[StepProfile]) -> StepProfile:
    parts = [part for part in Part if any(part in profile.parts for profile in profiles)]
    times = {part: [profile.parts.get(part, PartTime()) for profile in profiles] for part in parts}
    return StepProfile(
        {
            part: PartTime(
                sum(time.seconds for time in of_steps) / len(profiles),
                sum(time.cpu_seconds for time in of_steps) / len(profiles),
            )
            for part, of_steps in times.items()
        }
    )


def format_profile(profile: StepProfile, title: str) -> str:
    """Return a profile as a table of text with the heading ``title``, without parts below half a millisecond.

    Example:
        >>> parts = {Part.FORWARD: PartTime(0.3, 0.25), Part.TOOLS: PartTime(), Part.OTHER: PartTime(0.1, 0.1)}
        >>> print(format_profile(StepProfile(parts), "time of a step"))
        time of a step  seconds  share  CPU seconds
          forward         0.300   75 %        0.250
          other           0.100   25 %        0.100
          all             0.400  100 %        0.350
    """
    total = profile.total
    shown = {part.value: time for part, time in profile.parts.items() if time.seconds >= 0.0005}
    width = max(len(title), *(len(name) + 2 for name in (*shown, "all")))
    lines = [f"{title:<{width}}  seconds  share  CPU seconds"]
    for name, time_of_part in {**shown, "all": total}.items():
        share = time_of_part.seconds / total.seconds if total.seconds else 0.0
        row = f"{time_of_part.seconds:7.3f}  {100 * share:3.0f} %  {time_of_part.cpu_seconds:11.3f}"
        lines.append(f"{'  ' + name:<{width}}  {row}")
    return "\n".join(lines)


class Profiler(Protocol):
    def measure(self, part: Part) -> AbstractContextManager[object]:
        """Return a context manager. ``part`` is active while at least one thread is in the ``with`` block."""
        ...

    def take(self) -> StepProfile:
        """Return the profile of the time since the last call of ``take``, or since the profiler was made."""
        ...


class StepProfiler:
    """A profiler that measures the wall and CPU time of each part of a training step.

    Time counts for the active part. Several active parts share the time equally, with two exceptions:

    - While a validation is active, all of the time counts for the validation.
    - Tools, rewards, servers and ranks often only wait. While any other part is active, no time counts for these four.

    While no part is active, the CPU time of the process counts as "other" (at most the whole wall time). The remaining
    wall time counts as "waiting".

    Work on a GPU counts for the part that waits for the result, not for the part that starts the work.
    """

    def __init__(
        self, clock: Callable[[], float] = perf_counter, cpu_clock: Callable[[], float] = process_time
    ) -> None:
        self.lock = threading.Lock()
        self._clock, self._cpu_clock = clock, cpu_clock
        # the active meters: exclusive parts, parts that compute, parts in flight
        self._active: tuple[list[_Meter], list[_Meter], list[_Meter]] = ([], [], [])
        self._meters = {part: _Meter(self, self._active[_level(part)]) for part in Part}
        self._last, self._last_cpu = clock(), cpu_clock()

    def measure(self, part: Part) -> AbstractContextManager[object]:
        return self._meters[part]

    def take(self) -> StepProfile:
        with self.lock:
            self.distribute()
            return StepProfile({part: meter.take() for part, meter in self._meters.items()})

    def distribute(self) -> None:
        """Divide the time since the last call among the parts that are active now. The caller holds the lock."""
        now, cpu_now = self._clock(), self._cpu_clock()
        wall, cpu = now - self._last, cpu_now - self._last_cpu
        self._last, self._last_cpu = now, cpu_now
        exclusive, computing, in_flight = self._active
        meters = exclusive or computing or in_flight
        for meter in meters:
            meter.add(wall / len(meters), cpu / len(meters))
        if not meters:
            busy = min(wall, cpu)
            self._meters[Part.OTHER].add(busy, cpu)
            self._meters[Part.WAITING].add(wall - busy, 0.0)


def _level(part: Part) -> int:
    return 0 if part in _EXCLUSIVE else 2 if part in _IN_FLIGHT else 1


class _Meter(AbstractContextManager[None]):
    """A context manager that measures the time of one part of a step."""

    def __init__(self, profiler: StepProfiler, active: list[_Meter]) -> None:
        self._profiler, self._active = profiler, active
        self._count = 0  # how many threads are inside the context manager
        self._wall = self._cpu = 0.0

    def __enter__(self) -> None:
        with self._profiler.lock:
            if not self._count:
                self._profiler.distribute()
                self._active.append(self)
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._profiler.lock:
            self._count -= 1
            if not self._count:
                self._profiler.distribute()
                self._active.remove(self)

    def add(self, seconds: float, cpu_seconds: float) -> None:
        self._wall += seconds
        self._cpu += cpu_seconds

    def take(self) -> PartTime:
        time, self._wall, self._cpu = PartTime(self._wall, self._cpu), 0.0, 0.0
        return time


class _NoProfiler:
    def __init__(self) -> None:
        self._nothing = nullcontext()

    def measure(self, part: Part) -> AbstractContextManager[object]:
        return self._nothing

    def take(self) -> StepProfile:
        return StepProfile({})


NO_PROFILER: Profiler = _NoProfiler()
