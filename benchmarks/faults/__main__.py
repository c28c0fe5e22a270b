"""Faults, injected on purpose: what had to hold, whether it did, and whether the check can go red at all.

    make faults                                 the whole table (an hour on two cores)
    python benchmarks/faults --short            a few injections of each case (minutes)
    python benchmarks/faults --only crashes T12

Exit code 1 where something did not hold, too few faults happened, or a control stayed green or went red of another
reason than it should.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from case import Case, Control, Outcome, Size
from disks import DISKS
from failures import FAILURES
from golden import GOLDEN
from histories import outcome_of
from hostile_numbers import NUMBERS
from hostile_tools import HOSTILE_TOOLS
from killed_acting import KILLED_AHEAD
from killed_calls import KILLED_CALLS
from killed_saving import KILLED_SAVING
from killed_training import KILLED_AFTER_STEPS, KILLED_ANYWHERE
from processes import Child
from rich.console import Console
from rich.table import Table
from signalled import SIGNALLED
from two_processes import SECOND_PROCESS

FAMILIES: Mapping[str, tuple[Case, ...]] = {
    "crashes": (
        *(KILLED_ANYWHERE, KILLED_AHEAD, KILLED_SAVING, KILLED_CALLS, *DISKS),
        *(SECOND_PROCESS, KILLED_AFTER_STEPS, SIGNALLED),
    ),
    "failures": (*HOSTILE_TOOLS, *FAILURES, *NUMBERS, *GOLDEN),
}
"""What happens to a run's process and its disk; what goes wrong inside of a run."""


def _number(case: Case) -> tuple[int, str]:
    found = re.match(r"T(\d+)", case.name)
    return (int(found.group(1)) if found else 99, case.name)


CASES: tuple[Case, ...] = tuple(sorted((case for cases in FAMILIES.values() for case in cases), key=_number))

ELSEWHERE: Mapping[str, str] = {
    "T13 templates that rewrite what was said": "tests/rollout",
    "T19 an endpoint's clients that leave or repeat": "with the endpoint",
    "T21 starts side by side, ports": "with the endpoint and the viewer",
    "T24 programs that attack the sandbox": "tests/env/test_sandbox.py, benchmarks/escapes.py",
    "T25 pages and endpoints under attack": "with the viewer",
}
"""Rows of the plan that are shown somewhere else, or come with what they are about."""

SHOWN = 5
"""Lines of what is broken that are printed for a case."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case and of its controls."""

    case: Case
    wanted: int
    outcome: Outcome
    controls: tuple[tuple[Control, Outcome], ...]
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.outcome.broken and self.outcome.fired >= self.wanted

    @property
    def good(self) -> bool:
        return self.holds and all(control.seen(outcome) for control, outcome in self.controls)


def apart(run: Callable[[Size], Outcome], size: Size) -> Outcome:
    """Run in a process of its own: a fork of one that has run something else lacks its threads, and waits for them."""
    return outcome_of(Child(run, size))


def result_of(case: Case, short: bool, seed: int, jobs: int) -> Result:
    began = time.perf_counter()
    wanted = case.short if short else case.full
    outcome = apart(case.run, Size(wanted, seed, jobs))
    controls = tuple((control, apart(control.run, Size(control.injections, seed, jobs))) for control in case.controls)
    return Result(case, wanted, outcome, controls, time.perf_counter() - began)


def row_of(result: Result) -> tuple[str, ...]:
    bad = len(result.outcome.broken)
    said = "holds" if result.holds else f"{bad} BROKEN" if bad else f"TOO FEW: {result.wanted} wanted"
    controls = "\n".join(shown(control, outcome) for control, outcome in result.controls)
    counts = [f"{count} {name}" for name, count in result.outcome.counts.items()]
    fired = "\n".join([str(result.outcome.fired), *counts])
    case = result.case
    return case.name, case.injected, fired, case.holds, said, controls, f"{result.seconds:.0f}"


def shown(control: Control, outcome: Outcome) -> str:
    """Whether the check that had to see what was broken did, or another did, or none."""
    seen, lines = len(control.seen(outcome)), len(outcome.broken)
    counted = f"({seen} of {lines} lines, {outcome.fired} fired)"
    if seen:
        return f"{control.breaks}: red, {control.says.strip()!r} {counted}"
    return f"{control.breaks}: {f'OF ANOTHER REASON, {outcome.broken[0]}' if lines else 'GREEN'} {counted}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[*FAMILIES, *(case.name for case in CASES)], nargs="+", default=[*FAMILIES])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("", "injected", "fired", "must hold", "result", "control", "seconds")
    results = []
    asked = {case.name for family in options.only for case in FAMILIES.get(family, ())} | {*options.only}
    for case in CASES:
        if case.name in asked and (hindrance := case.hindrance()) is not None:
            print(f"{case.name}: not run: {hindrance}", flush=True)
        elif case.name in asked:
            results.append(result_of(case, options.short, options.seed, options.jobs))
            table.add_row(*row_of(results[-1]))
            said = "good" if results[-1].good else "BAD"
            print(f"{case.name}: {said}, {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
            for line in results[-1].outcome.broken[:SHOWN]:
                print(f"{case.name}: {line}", file=sys.stderr, flush=True)
    Console(width=140).print(table)
    for row, place in ELSEWHERE.items():
        print(f"elsewhere: {row}: {place}")
    print(f"seed {options.seed}; without a failure in n, the true rate is below 3/n with 95 % confidence")
    sys.exit(not all(result.good for result in results))


if __name__ == "__main__":
    main()
