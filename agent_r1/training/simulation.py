"""A discrete-event simulation of training: rollouts on engines, tools, updates, and transfers of weights.

- The staleness controller decides when a group starts.
- A decode step produces one token of every running sequence. New requests join between two decode steps.
- All turns of an attempt go to one engine.
- A training step uses the next groups, in the order in which the groups were started.

All times are simulated seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

ROUNDING = 1e-6
"""A tolerance for rounding errors. A computed number of 3.0000001 decode steps counts as 3, not as 4."""


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """The work of a turn: number of new prompt tokens, number of sampled tokens, and seconds of the turn's tools."""

    new_tokens: int
    action_tokens: int
    tool_seconds: float = 0.0


AttemptLoad = tuple[TurnLoad, ...]
GroupLoad = tuple[AttemptLoad, ...]


@dataclass(frozen=True, slots=True)
class EngineCost:
    """The seconds that one engine needs for its work.

    A decode step computes one token for each of b running sequences, in n = ceil(b / ``rows``) decode batches. K is the
    number of tokens in the KV cache. Each decode batch needs ``step`` fixed seconds, and ``weights`` seconds for
    reading the weights. Each sequence needs ``sequence`` seconds of arithmetic. Each token in the KV cache needs
    ``context`` seconds of reading. Arithmetic and reading run at the same time. So the seconds of a decode step are

        n * step + max(b * sequence, n * weights + K * context)

    Attributes:
        step: fixed seconds of a decode batch.
        sequence: seconds of the arithmetic of one sequence in a decode step.
        weights: seconds in which a decode batch reads the weights from memory.
        context: seconds in which a decode step reads the keys and values of one token in the KV cache.
        prefill_pass: fixed seconds of a prefill.
        prefill_token: seconds of the prefill of one new token.
        request: seconds of a request outside of the model, during which no token is sampled.
        rows: the largest number of sequences in a decode batch.
        slots: the largest number of running sequences.
        kv_tokens: the number of tokens in a full KV cache.
    """

    step: float = 0.0
    sequence: float = 0.0
    weights: float = 0.0
    context: float = 0.0
    prefill_pass: float = 0.0
    prefill_token: float = 0.0
    request: float = 0.0
    rows: int = 1_000_000
    slots: int = 1_000_000
    kv_tokens: float = math.inf

    def decode(self, sequences: int, context: float) -> float:
        """Return the seconds of a decode step. ``context`` is the number of tokens of all sequences in the KV cache."""
        batches = -(-sequences // self.rows)
        return batches * self.step + max(sequences * self.sequence, batches * self.weights + context * self.context)


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """The costs of the trainer in seconds: per update (fixed), per trained token, and per transfer of new weights."""

    update: float = 0.0
    token: float = 0.0
    publish: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The engines and the trainer of a simulated run.

    If ``is_shared`` is true, engine and trainer use one device, so that nothing is sampled during an update.
    """

    engines: int
    engine: EngineCost
    trainer: TrainerCost
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rules by which attempts start: groups per step, largest staleness in steps, and largest number of running
    attempts."""

    groups_per_step: int
    max_staleness: int = 0
    concurrency: int = 1_000_000


@dataclass(frozen=True, slots=True)
class EngineWork:
    """The work of all engines: the numbers of decode batches, sampled tokens, prefill passes, prefilled tokens and
    requests."""

    batches: int
    tokens: int
    passes: int
    new_tokens: int
    requests: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        step_ends: the time at which each training step ends.
        engine_seconds: the seconds in which engines computed, summed over the engines.
        update_seconds: the seconds in which the trainer computed.
    """

    step_ends: tuple[float, ...]
    engine_seconds: float
    update_seconds: float
    engines: int
    work: EngineWork

    @property
    def step_seconds(self) -> float:
        """The mean duration of a training step in seconds.

        The first step takes longer, and counts only if there is no second step.
        """
        ends = self.step_ends
        return ends[0] if len(ends) == 1 else (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def engine_utilization(self) -> float:
        return self.engine_seconds / (self.engines * self.step_ends[-1])

    @property
    def trainer_utilization(self) -> float:
        return self.update_seconds / self.step_ends[-1]


def simulate(groups: Sequence[GroupLoad], cluster: Cluster, schedule: Schedule) -> Timeline:
    """Return the timeline of training on ``groups``, with ``schedule.groups_per_step`` groups per step."""
    return _Simulation(groups, cluster, schedule).run()


@dataclass(slots=True)
class _Attempt:
    """A running attempt.

    Attributes:
        group: the index of the attempt's group.
        turn: the index of the next turn.
        context: the number of tokens in the conversation so far.
    """

    group: int
    load: AttemptLoad
    engine: _Engine
    turn: int = 0
    context: int = 0


class _Simulation:
    def __init__(self, groups: Sequence[GroupLoad], cluster: Cluster, schedule: Schedule) -> None:
        self._groups, self._cluster, self._schedule = groups, cluster, schedule
        self._steps = len(groups) // schedule.groups_per_step
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._engines = [_Engine(cluster.engine, self._on_action, self.at) for _ in range(cluster.engines)]
        self._unfinished = [len(group) for group in groups]  # attempts of each group
        self._pending: deque[tuple[int, AttemptLoad]] = deque()
        self._started = self._running = 0
        self._step_ends: list[float] = []
        self._is_training, self._update_seconds = False, 0.0

    def at(self, time: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> Timeline:
        self._start_groups(0.0)
        while self._events:
            time, _, event = heappop(self._events)
            event(time)
        work = [engine.work for engine in self._engines]
        total = EngineWork(*(sum(values) for values in zip(*work, strict=True)))
        seconds = sum(engine.busy for engine in self._engines)
        return Timeline(tuple(self._step_ends), seconds, self._update_seconds, len(self._engines), total)

    def _start_groups(self, now: float) -> None:
        ahead = min(self._schedule.max_staleness + 1, self._steps - len(self._step_ends))
        certain = (len(self._step_ends) + ahead) * self._schedule.groups_per_step
        while self._started < certain:
            self._pending.extend((self._started, attempt) for attempt in self._groups[self._started])
            self._started += 1
        self._start_attempts(now)

    def _start_attempts(self, now: float) -> None:
        while self._pending and self._running < self._schedule.concurrency:
            group, load = self._pending.popleft()
            engine = min(self._engines, key=lambda each: each.attempts)
            engine.attempts += 1
            self._running += 1
            engine.submit(now, _Attempt(group, load, engine))

    def _on_action(self, now: float, attempt: _Attempt) -> None:
        seconds = attempt.load[attempt.turn].tool_seconds
        attempt.turn += 1
        if attempt.turn < len(attempt.load):
            self.at(now + seconds, lambda time: attempt.engine.submit(time, attempt))
        else:
            self.at(now + seconds, lambda time: self._end_attempt(time, attempt))

    def _end_attempt(self, now: float, attempt: _Attempt) -> None:
        attempt.engine.attempts -= 1
        self._running -= 1
        self._unfinished[attempt.group] -= 1
        self._start_attempts(now)
        self._train(now)

    def _train(self, now: float) -> None:
        size = self._schedule.groups_per_step
        first = len(self._step_ends) * size
        if self._is_training or len(self._step_ends) == self._steps or any(self._unfinished[first : first + size]):
            return
        groups = self._groups[first : first + size]
        tokens = sum(turn.new_tokens + turn.action_tokens for group in groups for load in group for turn in load)
        seconds = self._cluster.trainer.update + tokens * self._cluster.trainer.token
        self._is_training = True
        self._update_seconds += seconds
        if self._cluster.is_shared:
            self._pause(now, seconds)
        self.at(now + seconds, self._publish)

    def _publish(self, now: float) -> None:
        self._pause(now, self._cluster.trainer.publish)
        self.at(now + self._cluster.trainer.publish, self._end_step)

    def _end_step(self, now: float) -> None:
        self._step_ends.append(now)
        self._is_training = False
        self._start_groups(now)
        self._train(now)

    def _pause(self, now: float, seconds: float) -> None:
        for engine in self._engines:
            engine.pause(now, seconds)


@dataclass(slots=True)
class _Engine:
    """A simulated engine. Its batch changes only at events, so all decode steps between two events take equally long.

    Attributes:
        attempts: the number of attempts of this engine.
        busy: the seconds in which the engine computed.
    """

    cost: EngineCost
    on_action: Callable[[float, _Attempt], None]
    at: Callable[[float, Callable[[float], None]], None]
    attempts: int = 0
    busy: float = 0.0
    _waiting: deque[_Attempt] = field(default_factory=deque)
    _running: list[tuple[int, int, _Attempt]] = field(default_factory=list)  # a heap by the step of the last token
    _order: count[int] = field(default_factory=count)
    _prompts: set[int] = field(default_factory=set)  # groups whose prompt is in the prefix cache
    _ticks: int = 0  # decode steps so far
    _context: int = 0  # tokens in the KV cache
    _reserved: int = 0  # tokens that the running sequences will have at most
    _start: float = 0.0  # when the first of the planned decode steps begins
    _step: float = 0.0  # seconds of each planned decode step
    _planned: int = 0
    _paused_until: float = 0.0
    _plan: int = 0  # the number of the plan; events of older plans are ignored
    _batches: int = 0
    _tokens: int = 0
    _passes: int = 0
    _new_tokens: int = 0
    _requests: int = 0

    @property
    def work(self) -> tuple[int, int, int, int, int]:
        return self._batches, self._tokens, self._passes, self._new_tokens, self._requests

    def submit(self, now: float, attempt: _Attempt) -> None:
        self._waiting.append(attempt)
        self._wake_at(self._interrupt(now))

    def pause(self, now: float, seconds: float) -> None:
        boundary = self._interrupt(now)
        self._paused_until = max(boundary, now + seconds)
        self._wake_at(boundary)

    def _interrupt(self, now: float) -> float:
        if self._planned:
            passed = math.ceil((now - self._start) / self._step - ROUNDING) if self._step else self._planned
            self._advance(min(self._planned, max(0, passed)))
        return max(self._start, now) if not self._running else self._start

    def _advance(self, steps: int) -> None:
        size = len(self._running)
        self._ticks += steps
        self._context += steps * size
        self._tokens += steps * size
        self._batches += steps * -(-size // self.cost.rows)
        self.busy += steps * self._step
        self._start += steps * self._step
        self._planned -= steps

    def _wake_at(self, time: float) -> None:
        self._plan += 1
        plan = self._plan
        self.at(time, lambda now: self._wake(now) if plan == self._plan else None)

    def _wake(self, now: float) -> None:
        self._interrupt(now)
        done = []
        while self._running and self._running[0][0] <= self._ticks:
            done.append(heappop(self._running)[2])
        for attempt in done:
            self._context -= attempt.context
            self._reserved -= attempt.context
        seconds = self._admit()
        self.busy += seconds
        self._start = max(now, self._paused_until) + seconds
        if self._running:
            self._step = self.cost.decode(len(self._running), self._context)
            self._planned = self._running[0][0] - self._ticks
            self._wake_at(self._start + self._planned * self._step)
        for attempt in done:
            self.on_action(now, attempt)

    def _admit(self) -> float:
        tokens = admitted = 0
        while self._waiting and self._has_room(self._waiting[0]):
            attempt = self._waiting.popleft()
            turn = attempt.load[attempt.turn]
            is_known = attempt.turn == 0 and attempt.group in self._prompts  # computed for another attempt
            tokens += 0 if is_known else turn.new_tokens
            self._prompts.add(attempt.group)
            self._context += attempt.context + turn.new_tokens
            attempt.context += turn.new_tokens + turn.action_tokens
            self._reserved += attempt.context
            admitted += 1
            heappush(self._running, (self._ticks + turn.action_tokens, next(self._order), attempt))
        if not admitted:
            return 0.0
        self._passes += 1
        self._new_tokens += tokens
        self._requests += admitted
        return self.cost.prefill_pass + tokens * self.cost.prefill_token + admitted * self.cost.request

    def _has_room(self, attempt: _Attempt) -> bool:
        if not self._running:
            return True  # one sequence always runs
        turn = attempt.load[attempt.turn]
        needed = self._reserved + attempt.context + turn.new_tokens + turn.action_tokens
        return len(self._running) < self.cost.slots and needed <= self.cost.kv_tokens
