"""What a case of the table is: something goes wrong, something must hold, and a check that can go red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a case to run: injections, the seed they are drawn by, processes side by side."""

    injections: int
    seed: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many faults happened, and a line for each that left something broken."""

    fired: int
    broken: tuple[str, ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.fired + other.fired, self.broken + other.broken)


@dataclass(frozen=True, slots=True)
class Control:
    """The same with something broken on purpose: an outcome in which nothing is broken means a blind check."""

    breaks: str
    run: Callable[[Size], Outcome]
    injections: int


@dataclass(frozen=True, slots=True)
class Case:
    """One row. ``full`` and ``short`` are the injections of the two forms; that many have to fire.

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
