"""What a run writes down: events, and the recorder that makes them durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.attempt import Attempt
from agent_r1.core.trajectory import Trajectory

FateName = Literal["trained", "dropped", "superseded"]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """An attempt was started, under weights of ``version``."""

    attempt: Attempt
    split: str
    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt ended; the trajectory says how, with its rewards."""

    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of an attempt in this lineage: trained at ``step``, or dropped for ``reason``."""

    attempt: Attempt
    fate: FateName
    step: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Metrics of one optimizer step, by name."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Happened:
    """Anything else worth knowing of a run: ``kind`` is a short word, ``detail`` a sentence or JSON."""

    kind: str
    detail: str


Event = Dispatched | Finished | Fate | Measured | Happened


class Recorder(Protocol):
    """Writes events down. ``record`` returns when they are durable."""

    async def record(self, *events: Event) -> None: ...
