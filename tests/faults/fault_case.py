"""A case of the fault table: a fault, a property that must hold, and controls that prove the check can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a case to run: the number of injections, their seed, and the number of parallel processes."""

    injections: int
    seed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The number of injected faults, one line per violation, and other counts by name."""

    fired: int
    violations: tuple[str, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Outcome) -> Outcome:
        counts = Counter(self.counts) + Counter(other.counts)
        return Outcome(self.fired + other.fired, self.violations + other.violations, counts)


NOTHING = Outcome(0, ())


@dataclass(frozen=True, slots=True)
class Control:
    """A negative control: the case with something broken on purpose, which a check must detect.

    Attributes:
        breaks: what is broken.
        says: words of the violation that proves the detection. Lines without them have another cause.
    """

    breaks: str
    says: str
    run: Callable[[Size], Outcome]
    injections: int

    def detections(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the lines that prove that the check detected the defect."""
        return tuple(line for line in outcome.violations if self.says in line)


def _runs_everywhere() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        full, short: the numbers of injections of the two forms; at least that many faults must happen.
        hindrance: returns why the case cannot run on this machine, None if it can.

    Example:
        Case("T2", "SIGKILL at each operation of a save", "an intact checkpoint exists", run, 100, 10, controls)
    """

    name: str
    injected: str
    holds: str
    run: Callable[[Size], Outcome]
    full: int
    short: int
    controls: tuple[Control, ...]
    hindrance: Callable[[], str | None] = _runs_everywhere
