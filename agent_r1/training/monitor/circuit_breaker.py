"""The circuit breaker: a run whose attempts fail for the same few reasons is stopped, and told why on one screen."""

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

TO_GO_ON = "  to go on all the same: --monitor.failure_share 1"

CALLS = 64
"""Calls of a tool that have to fail before it is taken for broken, however short the run is."""

CAUSES = 5
"""Reasons that are listed, the most common first."""

WIDTH = 110
"""Characters of a reason that are shown."""

ADVICE: Mapping[str, str] = {
    Status.ENVIRONMENT_FAILED: "the environment raised: open it on the example's task and step through by hand",
    Status.ENGINE_FAILED: "the engine could not generate: if memory ran out, lower --concurrency or --context",
    Status.REWARD_FAILED: "a scorer raised or took too long: call it on the example's trajectory; see --score_seconds",
    Status.CANCELLED: "by the engine, or past --episode_seconds, as its reason says: find what hangs, or give it time",
}
UNSCORED = "unscored"
ADVICE_UNSCORED = "a reward gave no finite number, or the policy no token: call it on the example's trajectory"
ADVICE_TOOL = "the tool fails whatever it is asked: call it by hand; for what the agent did wrong it should give text"

TOOL_FAULTS = frozenset({ToolErrorKind.RAISED, ToolErrorKind.TIMED_OUT, ToolErrorKind.BAD_RESULT})


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt of which nothing can be learned, for no reason of the algorithm's."""

    attempt: AttemptId
    status: Status
    reason: str

    @property
    def kind(self) -> str:
        """What is to be looked at: how it ended, or that it ended well and has no score."""
        return UNSCORED if STATUS_POLICY[self.status] == "train" else str(self.status)


@dataclass(frozen=True, slots=True)
class FailedToolCall:
    """A call that could be run, and that its tool made nothing of."""

    attempt: AttemptId
    reason: str

    @property
    def cause(self) -> str:
        """The tool's name and the type of what it raised: what follows mostly quotes what was asked."""
        return normalize_reason(": ".join(self.reason.split(": ")[:2]))


def normalize_reason(reason: str) -> str:
    """A reason without what differs from attempt to attempt: numbers, and what is too long to show."""
    return re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)?", "#", _shown(reason))


def _shown(reason: str) -> str:
    return " ".join(reason.split())[:WIDTH]


@dataclass(frozen=True, slots=True)
class CircuitBreakerState:
    """What a breaker looks back on: the last places, and the last calls of each tool, the oldest first; None where
    nothing failed.

    Example:
        CircuitBreakerState((None, Failed(..)), {"search": (FailedToolCall(..), None)})
    """

    places: tuple[FailedAttempt | None, ...] = ()
    calls: Mapping[str, tuple[FailedToolCall | None, ...]] = field(default_factory=dict)


class CircuitBreaker:
    """Looks back on the last ``window`` places of groups; their last tries count, as those before were made good for.

    It opens as soon as more than ``share`` of a window failed, and where the last ``calls`` calls of a tool all failed
    for one cause. A window has to hold many groups: a scorer that fails takes a whole group with it. Its word is asked
    before anything is learned from a group, so that a run that is stopped has not moved since.
    """

    def __init__(self, share: float, window: int, calls: int = CALLS) -> None:
        self._share, self._window, self._enough_calls = share, window, calls
        self._last: deque[FailedAttempt | None] = deque(maxlen=window)
        self._calls: dict[str, deque[FailedToolCall | None]] = {}

    def saw(self, group: Group, left_out: Sequence[Excluded]) -> str | None:
        """Take a group into account, and what of it cannot be learned from; the diagnosis where it is too much."""
        reasons = {out.attempt: out.reason for out in left_out}
        lived = group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)
        reasons |= {t.attempt: describe_status(t) for t in lived if STATUS_POLICY[t.status] != "train"}
        for trajectory in lived:
            attempt, status = trajectory.attempt, trajectory.status
            self._last.append(FailedAttempt(attempt, status, reasons[attempt]) if attempt in reasons else None)
            for name, call in _calls(trajectory):
                self._calls.setdefault(name, deque(maxlen=self._enough_calls)).append(call)
        if self._share == 1:
            return None
        failed = [place for place in self._last if place is not None]
        if len(failed) > self._share * self._window:
            allowed = f"a share of {self._share:g} in {self._window} is the limit"
            return "\n".join(diagnosis(failed, len(self._last), allowed))
        return next(filter(None, (self._of_tool(name) for name in self._calls)), None)

    def _of_tool(self, name: str) -> str | None:
        """The diagnosis of a tool that always fails."""
        failed = self._failed_calls(name)
        if len({call.cause for call in failed}) != 1:
            return None
        return "\n".join(
            (
                f"the last {len(failed)} calls of the tool {name!r} all failed, for one reason",
                f"{len(failed):>6} x {_shown(failed[-1].reason)}",
                f"         for example {failed[-1].attempt}",
                "what to do",
                f"  {name}: {ADVICE_TOOL}",
                TO_GO_ON,
            )
        )

    def mixed(self) -> Iterator[tuple[str, int]]:
        """Tools whose last calls all failed, for how many different causes: they may be asked wrongly."""
        for name in self._calls:
            causes = {call.cause for call in self._failed_calls(name)}
            if len(causes) > 1:
                yield name, len(causes)

    def early(self) -> tuple[int, int] | None:
        """How many failed of how many, where that is more than the share of what is not a window yet."""
        failed, seen = sum(place is not None for place in self._last), len(self._last)
        return (failed, seen) if seen < self._window and failed > self._share * seen else None

    def _failed_calls(self, name: str) -> list[FailedToolCall]:
        """The last calls of a tool where there are enough of them and all failed; else none."""
        last = self._calls[name]
        failed = [call for call in last if call is not None]
        return failed if len(failed) == self._enough_calls else []

    def state(self) -> CircuitBreakerState:
        return CircuitBreakerState(tuple(self._last), {name: tuple(calls) for name, calls in self._calls.items()})

    def restore(self, state: CircuitBreakerState) -> None:
        """Look back on what ``state`` holds too."""
        self._last.extend(state.places)
        self._calls.update((name, deque(calls, maxlen=self._enough_calls)) for name, calls in state.calls.items())


def _calls(trajectory: Trajectory) -> Iterator[tuple[str, FailedToolCall | None]]:
    """The calls of an attempt that could be run, by the name of their tool."""
    for turn in trajectory.turns:
        for call, result in zip(turn.action.message.calls, turn.results, strict=False):
            if result.error in TOOL_FAULTS:
                said = next((part.text for part in result.parts if isinstance(part, Text)), "")
                yield call.name, FailedToolCall(trajectory.attempt, said)
            elif result.error not in INVALID_CALL_KINDS:
                yield call.name, None


def diagnosis(failed: Sequence[FailedAttempt], of: int, limit: str) -> Iterator[str]:
    """What failed, how often and for example where, and what to do: a screen of lines."""
    by_cause: dict[str, list[FailedAttempt]] = {}
    for one in failed:
        by_cause.setdefault(normalize_reason(one.reason), []).append(one)
    ranked = sorted(by_cause.values(), key=lambda those: -len(those))
    yield f"{len(failed)} of the last {of} attempts failed; {limit}"
    for those in ranked[:CAUSES]:
        yield f"{len(those):>6} x {_shown(those[0].reason)}"
        yield f"         for example {those[0].attempt}"
    if rest := sum(map(len, ranked[CAUSES:])):
        yield f"{rest:>6} x {len(ranked) - CAUSES} other reasons"
    yield "what to do"
    for kind in dict.fromkeys(those[0].kind for those in ranked):
        yield f"  {kind}: {ADVICE.get(kind, ADVICE_UNSCORED)}"
    yield TO_GO_ON
