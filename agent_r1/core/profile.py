"""Where the time of a training step goes (``with measure("forward"):`` marks work), and what the engine did in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter, process_time
from typing import Literal, get_args

from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    WeightUpdate,
)

# "generation": decode steps. "publish": transfer of weights to the engine. "store": the run's database, and copies of
# weights for checkpoints. "waiting", "other": outside of all parts, the process computed nothing, or something else.
EnginePart = Literal["generation", "prefill", "sampling", "servers"]
RolloutPart = Literal["tools", "rewards", "rendering"]
TrainerPart = Literal["packing", "forward", "backward", "optimizer", "ranks"]
Part = Literal[EnginePart, RolloutPart, TrainerPart, "publish", "store", "validation", "waiting", "other"]
PARTS: tuple[str, ...] = get_args(Part)

_IN_FLIGHT = frozenset({"servers", "tools", "rewards", "ranks"})  # these often only wait, for example for a server
SECONDS, CPU_SECONDS = "profile/", "profile_cpu/"  # a profile is {"profile/forward": 0.2, "profile_cpu/forward": ..}


class StepProfiler:
    """Divides wall time, and the CPU time of the process, equally among the parts of a step that are active together.

    But a validation gets all of its time, and servers, tools, rewards and ranks only get the time in which no other
    part is active. Work on a GPU counts for the part that waits for the result.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = Counter[str]()  # threads and asyncio tasks inside of each part
        self._last, self._last_cpu = perf_counter(), process_time()
        self._times = dict.fromkeys((prefix + part for prefix in (SECONDS, CPU_SECONDS) for part in PARTS), 0.0)

    def switch(self, part: Part, change: Literal[1, -1]) -> None:
        """Enter or leave ``part``."""
        with self._lock:
            self._distribute()
            self._active[part] += change

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, by metric name."""
        with self._lock:
            self._distribute()
            times, self._times = self._times, dict.fromkeys(self._times, 0.0)
            return times

    def _distribute(self) -> None:
        now, cpu_now = perf_counter(), process_time()
        wall, cpu = now - self._last, cpu_now - self._last_cpu
        self._last, self._last_cpu = now, cpu_now
        active = [part for part, count in self._active.items() if count]
        active = ["validation"] if "validation" in active else active
        active = [part for part in active if part not in _IN_FLIGHT] or active
        shares = [(part, wall / len(active), cpu / len(active)) for part in active]
        busy = min(wall, cpu)
        for part, seconds, cpu_seconds in shares or [("other", busy, cpu), ("waiting", wall - busy, 0.0)]:
            self._times[SECONDS + part] += seconds
            self._times[CPU_SECONDS + part] += cpu_seconds


_profiler: StepProfiler | None = None  # one for the process and all of its threads, as CPU time is


@contextmanager
def profiling(profiler: StepProfiler | None) -> Iterator[None]:
    """Give the times of :func:`measure` to ``profiler`` during the ``with`` block. None: nothing is measured."""
    global _profiler
    before, _profiler = _profiler, profiler
    try:
        yield
    finally:
        _profiler = before


@contextmanager
def measure(part: Part) -> Iterator[None]:
    """Measure a ``with`` block, or a decorated function, as a part of the step."""
    profiler = _profiler
    if profiler is not None:
        profiler.switch(part, 1)
    try:
        yield
    finally:
        if profiler is not None:
            profiler.switch(part, -1)


def mean_profile(curves: Mapping[str, Mapping[int, float]], first_step: int = 1) -> dict[str, float]:
    """Return the mean profile of the recorded steps from ``first_step`` on. ``curves`` is ``{name: {step: value}}``."""
    recorded = {name: curve for name, curve in curves.items() if name.startswith((SECONDS, CPU_SECONDS))}
    values = {name: [curve[step] for step in curve if step >= first_step] for name, curve in recorded.items()}
    return {name: fmean(of_steps) for name, of_steps in values.items() if of_steps}


def format_profile(profile: Mapping[str, float], title: str) -> str:
    """Return a profile as a table of text, without parts below half a millisecond."""
    times = {part: (profile.get(SECONDS + part, 0.0), profile.get(CPU_SECONDS + part, 0.0)) for part in PARTS}
    total = tuple(map(sum, zip(*times.values(), strict=True)))
    shown = {part: time for part, time in times.items() if time[0] >= 0.0005}
    width = max(len(title), *(len(part) + 2 for part in (*shown, "all")))
    lines = [f"{title:<{width}}  seconds  share  CPU seconds"]
    for part, (wall, cpu) in {**shown, "all": total}.items():
        share = 100 * wall / total[0] if total[0] else 0.0
        lines.append(f"{'  ' + part:<{width}}  {wall:7.3f}  {share:3.0f} %  {cpu:11.3f}")
    return "\n".join(lines)


class EngineMeter:
    """Thread-safe counters of the work of an engine: requests, tokens and busy time. ``clock`` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._running = 0  # requests that the engine is working on
        self._last = self._began = clock()
        self._reset()

    def _reset(self) -> None:
        self._requests = self._generated = self._prompt = self._prefilled = 0
        self._reports_prefill = False
        self._busy = self._request_seconds = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Return a context manager that counts a running request during its ``with`` block."""
        with self._lock:
            self._advance()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._running -= 1

    def count(self, prompt: Prompt, completion: Completion) -> None:
        with self._lock:
            self._requests += 1
            self._prompt += len(prompt.token_ids)
            self._generated += len(completion.token_ids)
            if completion.prefilled_tokens is not None:
                self._prefilled += completion.prefilled_tokens
                self._reports_prefill = True

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, such as {"engine/requests": 12.0}, and set all counters to 0."""
        with self._lock:
            self._advance()
            elapsed = max(self._last - self._began, 1e-9)
            values = {
                "engine/requests": float(self._requests),
                "engine/generated_tokens": float(self._generated),
                "engine/prompt_tokens": float(self._prompt),
                "engine/utilization": min(1.0, self._busy / elapsed),
                "engine/running": self._request_seconds / self._busy if self._busy else 0.0,
            }
            if self._reports_prefill:
                values["engine/prefilled_tokens"] = float(self._prefilled)
            self._began = self._last
            self._reset()
            return values

    def _advance(self) -> None:
        # Add the time since the previous call to the counters of time. The caller must hold the lock.
        now = self._clock()
        if self._running:
            self._busy += now - self._last
            self._request_seconds += self._running * (now - self._last)
        self._last = now


@dataclass(frozen=True, slots=True)
class MeteredEngine:
    """An engine that counts the generations of ``engine`` with ``meter``."""

    engine: InferenceEngine
    meter: EngineMeter

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        with self.meter.request():
            completion = await self.engine.generate(prompt, params, session_id=session_id)
        self.meter.count(prompt, completion)
        return completion

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self.engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        await self.engine.release(session_id)

    async def close(self) -> None:
        await self.engine.close()
