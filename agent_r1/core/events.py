"""What a run writes down: events, and the recorder that makes them durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.trajectory import Trajectory

FateName = Literal["trained", "dropped", "superseded"]


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An attempt was started, under weights of ``version``."""

    attempt: AttemptId
    split: str
    version: int


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    """An attempt ended; the trajectory says how, with its rewards."""

    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class AttemptFate:
    """What became of an attempt in this lineage: trained at ``step``, or dropped for ``reason``.

    ``credit`` is the sum of its action tokens' advantages in that step, None where it was given none.
    """

    attempt: AttemptId
    fate: FateName
    step: int
    reason: str | None = None
    credit: float | None = None


@dataclass(frozen=True, slots=True)
class PendingDropped:
    """Every attempt that has no fate by now is dropped, for ``reason``: the run has taken its last ``step``."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyPublished:
    """Step ``step`` made the weights of ``version``; ``digest`` tells them from all others.

    Example:
        PolicyPublished(version=0, step=0, digest="9f86..") are the weights a run begins with.
    """

    version: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one optimizer step, by name: numbers that come out the same when the run is repeated exactly."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepTimings:
    """What one optimizer step took, by name: seconds, speeds, bytes. They differ each time."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The checkpoint of ``step`` is on the disk, whole."""

    step: int


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Anything else worth knowing of a run: ``kind`` is a short word, ``detail`` a sentence or JSON."""

    kind: str
    detail: str


Event = (
    AttemptStarted
    | AttemptFinished
    | AttemptFate
    | PendingDropped
    | PolicyPublished
    | StepMetrics
    | StepTimings
    | CheckpointSaved
    | LogEvent
)


class Recorder(Protocol):
    """Writes events down. ``record`` returns when they are durable."""

    async def record(self, *events: Event) -> None: ...
