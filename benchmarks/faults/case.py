"""What a case of the table is: something goes wrong, something must hold, and a check that can go red."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a case to run: injections, the seed they are drawn by, processes side by side."""

    injections: int
    seed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many faults happened, a line for each thing that was left broken, and how often what else was counted."""

    fired: int
    broken: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Outcome) -> Outcome:
        counts = Counter(self.counts) + Counter(other.counts)
        return Outcome(self.fired + other.fired, self.broken + other.broken, counts)


NOTHING = Outcome(0, ())


@dataclass(frozen=True, slots=True)
class Control:
    """The same with something broken on purpose, and what the check that has to see it says.

    A line without these words is red for another reason, and shows nothing of that check.
    """

    breaks: str
    says: str
    run: Callable[[Size], Outcome]
    injections: int

    def seen(self, outcome: Outcome) -> tuple[str, ...]:
        """The lines by which the check saw what was broken."""
        return tuple(line for line in outcome.broken if self.says in line)


def possible() -> str | None:
    """Nothing is in the way."""
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One row. ``full`` and ``short`` are the injections of the two forms; that many have to fire.

    ``hindrance`` says why the case cannot be run on this machine, where it cannot.

    Example:
        Case("T2", "SIGKILL at each operation of a save", "a whole checkpoint is there", run, 100, 10, controls)
    """

    name: str
    injected: str
    holds: str
    run: Callable[[Size], Outcome]
    full: int
    short: int
    controls: tuple[Control, ...]
    hindrance: Callable[[], str | None] = possible
