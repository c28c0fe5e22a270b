"""The events that a run records, and the recorder that stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.inference import PolicyVersion
from agent_r1.core.trajectory import AttemptId, Trajectory


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The numbers that one update computed for the action tokens of one turn.

    Each tuple has one number per token, in the order of ``Turn.action_ids``.
    """

    attempt: AttemptId
    turn: int
    # under the trainer's weights before the update, at the sampler's temperature; NaN if not known, for example if the
    # weights had already changed when the trainer first read the token
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    # times the importance weight; 0 if the loss mask, or the algorithm's ``token_mask`` or ``rejection``, excludes it
    loss_weights: tuple[float, ...]
    entropies: tuple[float, ...]  # in nats, in the update's first forward pass over the token
    # the value of the state before the token, by the critic or by continuations of attempts; () without both
    values: tuple[float, ...] = ()


FateName = Literal["trained", "dropped", "superseded"]


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    attempt: AttemptId
    split: str
    version: int  # of the newest policy weights when the attempt's group started, also for a retry


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class AttemptFate:
    """An attempt was trained or dropped at ``step``: once in a segment of the run."""

    attempt: AttemptId
    fate: FateName
    step: int
    reason: str | None = None  # why the attempt was dropped
    credit: float | None = None  # the sum of the advantages of a trained attempt's tokens


@dataclass(frozen=True, slots=True)
class TokensRecorded:
    """An update computed numbers for each action token of at most ``record_tokens`` groups."""

    records: tuple[TokenRecord, ...]


PENDING_AT_END = "the run had taken its last step"
"""The reason of the attempts that no step was made of, because the run ended first."""


STOPPED_EARLY = "stopped_early"
"""The kind of the event of a run that ended before its last step, because validations were no longer better."""


@dataclass(frozen=True, slots=True)
class PendingDropped:
    """The run ended. All attempts that were neither trained nor dropped before are dropped at this event."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyPublished:
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one optimizer step, by name. An exact repetition of the run gives the same values."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Measured times, speeds and sizes of one optimizer step, by name. A repetition of the run gives other values."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was completely saved on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event that has no class of its own. ``kind`` is a short word, and ``detail`` is a sentence or JSON."""

    kind: str
    detail: str


Event = (
    AttemptStarted
    | AttemptFinished
    | AttemptFate
    | TokensRecorded
    | PendingDropped
    | PolicyPublished
    | StepMetrics
    | StepTimings
    | CheckpointSaved
    | LogEvent
)


class Recorder(Protocol):
    """A recorder of events. ``record`` returns when the events are safely stored."""

    async def record(self, *events: Event) -> None: ...
