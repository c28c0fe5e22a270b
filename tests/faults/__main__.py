"""Fault injection: a table of faults, the properties that must hold, and controls that prove each check can fail.

    make faults                                 the whole table (an hour on two cores)
    python tests/faults --short            a few injections of each case (minutes)
    python tests/faults --smoke            one injection of each case, no controls (as in make test)
    python tests/faults --only T1 T5a

Exit code 1 if a property does not hold, too few faults happened, or a control was not detected for its own reason.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from changed_database import CHANGED_DATABASE
from failing_disks import DISKS
from fault_case import Case, Control, Outcome, Size
from kill_histories import outcome_of
from killed_rollouts import KILLED_AHEAD
from killed_saving import KILLED_SAVING
from killed_system_calls import KILLED_CALLS
from killed_training import KILLED_AFTER_STEPS, KILLED_ANYWHERE
from processes import Child
from rich.console import Console
from rich.table import Table
from shutdown_signals import SIGNALLED
from two_processes import SECOND_PROCESS

FAULTS: tuple[Case, ...] = (
    *(KILLED_ANYWHERE, KILLED_AHEAD, KILLED_SAVING, KILLED_CALLS, *DISKS, CHANGED_DATABASE),
    *(SECOND_PROCESS, KILLED_AFTER_STEPS, SIGNALLED),
)
"""Faults of a run's process and disk. Parts of a run that fail are in the tests of their rooms, and in soak.py."""


def _number(case: Case) -> tuple[int, str]:
    found = re.match(r"T(\d+)", case.name)
    return (int(found.group(1)) if found else 99, case.name)


CASES: tuple[Case, ...] = tuple(sorted(FAULTS, key=_number))

MAX_LINES = 5
"""Violations that are printed per case."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case and of its controls."""

    case: Case
    required: int
    outcome: Outcome
    controls: tuple[tuple[Control, Outcome], ...]
    seconds: float

    @property
    def is_valid(self) -> bool:
        return not self.outcome.violations and self.outcome.fired >= self.required

    @property
    def is_good(self) -> bool:
        return self.is_valid and all(control.detections(outcome) for control, outcome in self.controls)


def run_in_process(run: Callable[[Size], Outcome], size: Size) -> Outcome:
    """Run in a separate process: a fork of a process that already ran something lacks its threads and would hang."""
    return outcome_of(Child(run, size))


def result_of(case: Case, form: str, seed: int, jobs: int) -> Result:
    began = time.perf_counter()
    required = {"full": case.full, "short": case.short, "smoke": 1}[form]
    outcome = run_in_process(case.run, Size(required, seed, jobs))
    controls = tuple(
        (control, run_in_process(control.run, Size(control.injections, seed, jobs)))
        for control in (case.controls if form != "smoke" else ())
    )
    return Result(case, required, outcome, controls, time.perf_counter() - began)


def row_of(result: Result) -> tuple[str, ...]:
    bad = len(result.outcome.violations)
    verdict = "holds" if result.is_valid else f"{bad} VIOLATIONS" if bad else f"TOO FEW: {result.required} required"
    controls = "\n".join(describe_control(control, outcome) for control, outcome in result.controls)
    counts = [f"{count} {name}" for name, count in result.outcome.counts.items()]
    fired = "\n".join([str(result.outcome.fired), *counts])
    case = result.case
    return case.name, case.injected, fired, case.holds, verdict, controls, f"{result.seconds:.0f}"


def describe_control(control: Control, outcome: Outcome) -> str:
    """Return whether the control was detected, by its own check, by another one, or not at all."""
    detected, lines = len(control.detections(outcome)), len(outcome.violations)
    counts = f"({detected} of {lines} lines, {outcome.fired} fired)"
    if detected:
        return f"{control.breaks}: detected, {control.says.strip()!r} {counts}"
    return f"{control.breaks}: {f'ANOTHER VIOLATION, {outcome.violations[0]}' if lines else 'NOT DETECTED'} {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, nargs="+", default=names)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--short", action="store_const", dest="form", const="short", default="full")
    form.add_argument("--smoke", action="store_const", dest="form", const="smoke")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("", "injected", "fired", "must hold", "result", "control", "seconds")
    results = []
    for case in CASES:
        if case.name in options.only and (hindrance := case.hindrance()) is not None:
            print(f"{case.name}: not run: {hindrance}", flush=True)
        elif case.name in options.only:
            results.append(result_of(case, options.form, options.seed, options.jobs))
            table.add_row(*row_of(results[-1]))
            verdict = "good" if results[-1].is_good else "BAD"
            print(f"{case.name}: {verdict}, {results[-1].seconds:.0f} s", file=sys.stderr, flush=True)
            for line in results[-1].outcome.violations[:MAX_LINES]:
                print(f"{case.name}: {line}", file=sys.stderr, flush=True)
    Console(width=140).print(table)
    print(f"seed {options.seed}; without a failure in n, the true rate is below 3/n with 95 % confidence")
    sys.exit(not all(result.is_good for result in results))


if __name__ == "__main__":
    main()
