"""The circuit breaker, which stops a run with a diagnosis if too many attempts fail."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.messages import Text
from agent_r1.core.trajectory import STATUS_POLICY, Group, Status, Trajectory
from agent_r1.data.training_sample import Excluded, describe_status
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind

_OVERRIDE = "  to continue nevertheless: --monitor.failure_share 1"

CALL_WINDOW = 64
"""A run is stopped after this number of consecutive calls of one tool that failed for the same cause."""

MAX_REASONS = 5

MAX_REASON_LENGTH = 110

ADVICE: Mapping[str, str] = {
    Status.ENVIRONMENT_FAILED: "the environment or your agent raised: run it by hand with the example's task",
    Status.ENGINE_FAILED: "the engine could not generate: if memory ran out, lower --concurrency or --context",
    Status.REWARD_FAILED: "a scorer raised or took too long: call it on the example's trajectory; see --score_seconds",
    Status.CANCELLED: "by the engine, or after --episode_seconds, see the reason: find what hangs, or raise the limit",
}
UNSCORED = "unscored"
_ADVICE_UNSCORED = (
    "a reward function raised or returned no finite number, or the policy sampled no token: "
    "test the function (docs/rewards.md)"
)
_ADVICE_TOOL = (
    "the tool always fails: call it by hand; for errors of the agent it should return text instead of raising"
)

_PLACE = re.compile(r" \([^()]{1,50}:\d+, in [^()]{1,30}\)$")
"""A regular expression for the place of an exception, such as " (agent.py:12, in find)"."""

_TOOL_FAILURES = frozenset({ToolErrorKind.RAISED, ToolErrorKind.TIMED_OUT, ToolErrorKind.BAD_RESULT})


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed, or that cannot be trained on, for example because a reward is not finite."""

    attempt: AttemptId
    status: Status
    reason: str

    @property
    def kind(self) -> str:
        """The status of the attempt, such as "environment_failed", or "unscored" if a reward could not be computed."""
        return UNSCORED if STATUS_POLICY[self.status] == "train" else str(self.status)


@dataclass(frozen=True, slots=True)
class FailedToolCall:
    """A valid call whose tool raised an exception, took too long, or returned a value of a wrong type."""

    attempt: AttemptId
    reason: str

    @property
    def cause(self) -> str:
        """The cause of the failure: the text of ``reason`` before the second colon, with ``#`` for each number.

        The rest of the reason often differs from call to call. For example, the reason "find failed: KeyError: 'Alba'"
        has the cause "find failed: KeyError".
        """
        return normalize_reason(": ".join(self.reason.split(": ")[:2]))


def normalize_reason(reason: str) -> str:
    """Return the reason of a failure, shortened, with each number replaced by ``#``.

    Two failures are counted as the same failure if their normalized reasons are equal.

    Example:
        >>> normalize_reason("timeout after 2.5 s at 0x7f3a")
        'timeout after # s at #'
    """
    shortened = " ".join(reason.split())[:MAX_REASON_LENGTH]
    return re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)?", "#", shortened)


@dataclass(frozen=True, slots=True)
class CircuitBreakerState:
    """The state of a circuit breaker: the recent attempts, and the recent calls of each tool, oldest first.

    An attempt or a call that did not fail is stored as None.

    Example:
        CircuitBreakerState(attempts=(None, FailedAttempt(..)), calls={"search": (FailedToolCall(..), None)})
    """

    attempts: tuple[FailedAttempt | None, ...] = ()
    calls: Mapping[str, tuple[FailedToolCall | None, ...]] = field(default_factory=dict)


class CircuitBreaker:
    """A breaker that stops the run if too many recent attempts failed, or if a tool always fails.

    If an attempt was retried, only its last retry is counted.

    Args:
        share: the largest allowed share of failed attempts. 1: the run is never stopped, even if a tool always fails.
        window: the number of recent attempts that are counted. The window should hold several groups, because one
            error of a scorer fails all attempts of a group.
        call_window: the number of recent calls of each tool that are counted; see :data:`CALL_WINDOW`.
        run: the name of the run, for commands in the diagnosis.
    """

    def __init__(self, share: float, window: int, call_window: int = CALL_WINDOW, run: str = "RUN") -> None:
        self._share, self._window, self._call_window, self.run = share, window, call_window, run
        self._attempts: deque[FailedAttempt | None] = deque(maxlen=window)
        self._calls: dict[str, deque[FailedToolCall | None]] = {}

    def record(self, group: Group, excluded: Sequence[Excluded]) -> str | None:
        """Record the attempts and tool calls of a group. Return a diagnosis if the run must be stopped.

        Call this method before the run trains on the group. ``excluded`` are the attempts of the group that cannot be
        trained on. These attempts count as failed.
        """
        reasons = {one.attempt: one.reason for one in excluded}
        trajectories = group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)
        reasons |= {t.attempt: describe_status(t) for t in trajectories if STATUS_POLICY[t.status] != "train"}
        for trajectory in trajectories:
            attempt, status = trajectory.attempt, trajectory.status
            failed = FailedAttempt(attempt, status, reasons[attempt]) if attempt in reasons else None
            self._attempts.append(failed)
            for name, call in _valid_calls(trajectory):
                self._calls.setdefault(name, deque(maxlen=self._call_window)).append(call)
        if self._share == 1:
            return None
        failures = [attempt for attempt in self._attempts if attempt is not None]
        if len(failures) > self._share * self._window:
            limit = f"a share of {self._share:g} in {self._window} is the limit"
            return "\n".join(diagnose(failures, len(self._attempts), limit, self.run))
        return next(filter(None, (self._diagnose_tool(name) for name in self._calls)), None)

    def tools_failing_for_several_causes(self) -> Iterator[tuple[str, int]]:
        """Yield (name, number of causes) for each tool whose recent calls all failed, but for different causes.

        Such failures do not stop the run, because they can be errors of the agent.
        """
        for name in self._calls:
            causes = {call.cause for call in self._failed_calls(name)}
            if len(causes) > 1:
                yield name, len(causes)

    def early_failures(self) -> tuple[int, int] | None:
        """Return (failed attempts, ended attempts) if too many attempts failed at the beginning of the run.

        Return None if at least ``window`` attempts have ended, or if the number of failed attempts is at most ``share``
        times the number of ended attempts. A failed attempt is also an ended attempt.
        """
        failed, seen = sum(attempt is not None for attempt in self._attempts), len(self._attempts)
        return (failed, seen) if seen < self._window and failed > self._share * seen else None

    def state(self) -> CircuitBreakerState:
        calls = {name: tuple(calls) for name, calls in self._calls.items()}
        return CircuitBreakerState(tuple(self._attempts), calls)

    def load_state(self, state: CircuitBreakerState) -> None:
        self._attempts.extend(state.attempts)
        self._calls.update((name, deque(calls, maxlen=self._call_window)) for name, calls in state.calls.items())

    def _diagnose_tool(self, name: str) -> str | None:
        failed = self._failed_calls(name)
        if len({call.cause for call in failed}) != 1:
            return None
        return "\n".join(
            (
                f"the last {len(failed)} calls of the tool {name!r} all failed, for one reason",
                f"{len(failed):>6} x {shorten_reason(failed[-1].reason)}",
                _example(failed[-1].attempt, self.run),
                "what to do",
                f"  {name}: {_ADVICE_TOOL}",
                _OVERRIDE,
            )
        )

    def _failed_calls(self, name: str) -> list[FailedToolCall]:
        """Return the last ``call_window`` calls of a tool if all of them failed; [] otherwise."""
        failed = [call for call in self._calls[name] if call is not None]
        return failed if len(failed) == self._call_window else []


def diagnose(failures: Sequence[FailedAttempt], total: int, limit: str, run: str) -> Iterator[str]:
    """Yield the lines of a diagnosis of failed attempts: each reason with its count and an example, then advice.

    ``total`` is the number of recent attempts, failed or not. ``limit`` is a text with the limit that is exceeded. For
    example, if at most half of the last 256 attempts may fail, the text is "a share of 0.5 in 256 is the limit".
    ``run`` is the name of the run.
    """
    by_reason: dict[str, list[FailedAttempt]] = {}
    for failure in failures:
        by_reason.setdefault(normalize_reason(failure.reason), []).append(failure)
    ranked = sorted(by_reason.values(), key=lambda same: -len(same))
    yield f"{len(failures)} of the last {total} attempts failed; {limit}"
    for same in ranked[:MAX_REASONS]:
        yield f"{len(same):>6} x {shorten_reason(same[0].reason)}"
        yield _example(same[0].attempt, run)
    if others := sum(map(len, ranked[MAX_REASONS:])):
        yield f"{others:>6} x {len(ranked) - MAX_REASONS} other reasons"
    yield "what to do"
    for kind in dict.fromkeys(same[0].kind for same in ranked):
        yield f"  {kind}: {ADVICE.get(kind, _ADVICE_UNSCORED)}"
    yield _OVERRIDE


def _example(attempt: AttemptId, run: str) -> str:
    """Return a line with the id of an attempt and the command that shows this attempt.

    Example:
        >>> _example(AttemptId("demo", "style-a/7", 3, 0), "demo")
        '         for example demo:3.0.0:style-a/7: agent-r1 show demo 3.0.0'
    """
    return f"         for example {attempt}: agent-r1 show {run} {'.'.join(map(str, attempt.sort_key))}"


def _valid_calls(trajectory: Trajectory) -> Iterator[tuple[str, FailedToolCall | None]]:
    """Yield (name of the tool, failure or None) for each call of an existing tool with valid arguments."""
    for turn in trajectory.turns:
        for call, result in zip(turn.action.message.calls, turn.results, strict=False):
            if result.error in _TOOL_FAILURES:
                text = next((part.text for part in result.parts if isinstance(part, Text)), "")
                yield call.name, FailedToolCall(trajectory.attempt, text)
            elif result.error not in INVALID_CALL_KINDS:
                yield call.name, None


def shorten_reason(reason: str) -> str:
    """Return the reason of a failure, cut to at most MAX_REASON_LENGTH characters.

    If a long reason ends with the place of an exception, only the text before the place is cut:
    "ValueError: a long text that is.. (agent.py:12, in find)".
    """
    text = " ".join(reason.split())
    if len(text) <= MAX_REASON_LENGTH:
        return text
    place = _PLACE.search(text)
    end = f"..{place[0]}" if place else ".."
    return text[: MAX_REASON_LENGTH - len(end)] + end
