"""The recorder that sends metrics to trackers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from agent_r1.core.errors import shorten
from agent_r1.core.events import AttemptFinished, Event, LogEvent, Recorder, StepMetrics, StepTimings
from agent_r1.core.redaction import redact
from agent_r1.core.trajectory import Trajectory
from agent_r1.trackers.names import metric_name
from agent_r1.trackers.protocol import AttemptSample, RunEnd, TrackedRun, Tracker
from agent_r1.trackers.registry import TRACKERS

HANG_SECONDS = 120.0
"""The time limit of each call of a tracker, in seconds. It is also the time limit of :meth:`TrackingRecorder.close`,
which ends all trackers."""

SAMPLES, SAMPLE_EVERY = 2, 10
"""Trackers show at most ``SAMPLES`` attempts of a step as text: at step 1, and at each step that is a multiple of
``SAMPLE_EVERY``."""

Job = Callable[[Tracker], object]


class TrackingRecorder:
    """A recorder that passes all events on to ``recorder`` and sends their metrics to trackers.

    Each tracker runs in its own daemon thread, and ``record`` never waits for a tracker. If a call of a tracker raises
    or takes more than ``limit`` seconds, one warning is printed and the tracker gets no more calls.

    A restart of the trainer's ranks can repeat steps. A tracker does not get the values of a repeated step again,
    because most services cannot replace a value.

    Args:
        recorder: writes the events to the disk.
        names: the names of the trackers.
        warn: prints a warning.
        limit: seconds; None for ``HANG_SECONDS``.
    """

    def __init__(
        self,
        recorder: Recorder,
        names: Sequence[str],
        run: TrackedRun,
        warn: Callable[[str], object],
        limit: float | None = None,
    ) -> None:
        self._recorder, self._warn = recorder, warn
        self._limit = HANG_SECONDS if limit is None else limit
        self._threads = [_TrackerThread(name, run) for name in names]
        self._attempts: list[Trajectory] = []
        self._newest_step, self._names_of_newest = 0, set[str]()  # which values the trackers have

    async def record(self, *events: Event) -> None:
        """Record the events on the disk, then send their metrics and attempts to the trackers.

        Errors of the disk are raised. Errors of trackers are not raised.
        """
        await self._recorder.record(*events)
        if self._threads:
            self._track(events)
            for failure in self._drop_failed():
                await self._recorder.record(LogEvent("warning", failure))

    def close(self, end: RunEnd) -> None:
        """Finish all trackers. The maximum total waiting time is the recorder's argument ``limit``, in seconds."""
        for thread in self._threads:
            thread.submit(lambda tracker: tracker.finish(end))
            thread.submit(None)
        deadline = time.monotonic() + self._limit
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for thread in self._threads:
            if thread.failure is None and thread.is_alive():
                thread.failure = f"it did not end within {self._limit:g} s"
        self._drop_failed()

    def _track(self, events: Sequence[Event]) -> None:
        values: dict[int, dict[str, float]] = {}
        for event in events:
            match event:
                case StepMetrics(step, metrics):
                    values.setdefault(step, {}).update(_renamed(metrics))
                case StepTimings(step, metrics):
                    values.setdefault(step, {}).update(_renamed(metrics, are_timings=True))
                case AttemptFinished(trajectory):
                    # The first attempts of the first groups, in whatever order the attempts end.
                    self._attempts.append(trajectory)
                    self._attempts = sorted(self._attempts, key=lambda one: one.attempt.sort_key)[:SAMPLES]
        for step, metrics in values.items():
            if new := self._without_repeated(step, metrics):
                self._submit(_metrics_job(step, new))
                if self._attempts and (step == 1 or step % SAMPLE_EVERY == 0):
                    self._submit(_attempts_job(step, tuple(map(AttemptSample.of, self._attempts))))
            self._attempts = []

    def _without_repeated(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if step > self._newest_step:
            self._newest_step, self._names_of_newest = step, set()
        if step < self._newest_step:
            return {}
        new = {name: value for name, value in metrics.items() if name not in self._names_of_newest}
        self._names_of_newest |= new.keys()
        return new

    def _submit(self, job: Job) -> None:
        for thread in self._threads:
            thread.submit(job)

    def _drop_failed(self) -> list[str]:
        """Remove each tracker that failed or hangs, and print a warning. Return the warnings."""
        failures = []
        for thread in list(self._threads):
            thread.failure = thread.failure or thread.hangs(self._limit)
            if thread.failure is not None:
                self._threads.remove(thread)
                failures.append(f"tracker {thread.tracker}: {thread.failure}; the run continues without it")
                self._warn(f"WARNING: {failures[-1]}")
        return failures


class _TrackerThread(threading.Thread):
    """The daemon thread that makes one tracker and calls its methods.

    Attributes:
        failure: the reason why the tracker gets no more calls; None while the tracker works.
    """

    def __init__(self, tracker: str, run: TrackedRun) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker = tracker
        self.failure: str | None = None
        self._tracked_run = run
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._called: float | None = time.monotonic()  # when the call in progress began; None between calls
        self.start()

    def submit(self, job: Job | None) -> None:
        """Queue a job: the thread calls ``job(tracker)``. None ends the thread."""
        self._jobs.put(job)

    def hangs(self, limit: float) -> str | None:
        called = self._called
        if called is None or time.monotonic() - called <= limit:
            return None
        return f"a call did not return within {limit:g} s"

    def run(self) -> None:
        try:
            tracker = TRACKERS[self.tracker](self._tracked_run)
            self._called = None
            while self.failure is None and (job := self._jobs.get()) is not None:
                self._called = time.monotonic()
                job(tracker)
                self._called = None
        except BaseException as error:  # SystemExit too, which packages raise in order to end the process
            self._called = None
            self.failure = redact(" ".join(shorten(f"{type(error).__name__}: {error}").split()))


def _metrics_job(step: int, values: Mapping[str, float]) -> Job:
    return lambda tracker: tracker.log_metrics(step, values)


def _attempts_job(step: int, attempts: Sequence[AttemptSample]) -> Job:
    return lambda tracker: tracker.log_attempts(step, attempts)


def _renamed(values: Mapping[str, float], are_timings: bool = False) -> dict[str, float]:
    return {metric_name(name, are_timings): value for name, value in values.items()}
