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

    Attributes:
        turn: the index of the turn in its trajectory.
        logprobs: the log-probability under the trainer's weights before the update, at the sampler's temperature. NaN
            if not known, for example if the weights had already changed when the trainer first read the token.
        loss_weights: the weight in the policy loss, multiplied by the importance weight. 0 if the loss mask, or the
            algorithm's ``token_mask`` or ``rejection``, excludes the token.
        entropies: the entropy of the policy at the token, in nats, in the update's first forward pass over the token.
        values: the critic's value of the state before the token; () without a critic.

    Example:
        TokenRecord(attempt, turn=0, logprobs=(-0.3, -0.1), advantages=(0.7, 0.7), loss_weights=(0.01, 0.01),
                    entropies=(0.9, 0.2))
    """

    attempt: AttemptId
    turn: int
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    loss_weights: tuple[float, ...]
    entropies: tuple[float, ...]
    values: tuple[float, ...] = ()


FateName = Literal["trained", "dropped", "superseded"]


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    """An event: an attempt started.

    ``version`` is the number of the newest policy weights when the group of the attempt started. A retry has the
    version of its group.
    """

    attempt: AttemptId
    split: str
    version: int


@dataclass(frozen=True, slots=True)
class AttemptFinished:
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class AttemptFate:
    """An event: an attempt was trained or dropped at ``step``.

    Each attempt has at most one fate per segment of a run (a stretch of training without a stop). ``reason`` says why
    an attempt was dropped. ``credit`` is the sum of the advantages of a trained attempt's tokens; otherwise None.

    Example:
        AttemptFate(attempt=attempt, fate="dropped", step=3, reason="advantage 0 on every token")
    """

    attempt: AttemptId
    fate: FateName
    step: int
    reason: str | None = None
    credit: float | None = None


@dataclass(frozen=True, slots=True)
class TokensRecorded:
    """An event: an update computed numbers, such as advantages, for each action token of a few groups.

    The setting ``record_tokens`` is the maximum number of these groups per step.
    """

    records: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True)
class PendingDropped:
    """An event: the run ended at ``step``.

    All attempts that were neither trained nor dropped before are dropped at this event, for ``reason``.
    """

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyPublished:
    """An event: the trainer published new policy weights.

    Example:
        PolicyPublished(PolicyVersion(0, step=0, checksum="9f86.."))  # the initial weights of the run
    """

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
    """An event: a checkpoint was completely saved on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event that has no class of its own.

    ``kind`` is a short word, and ``detail`` is a sentence or JSON.

    Example:
        LogEvent(kind="warning", detail="logprob_gap: engine and trainer disagree on the log-probability ..")
    """

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
