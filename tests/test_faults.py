"""The table of faults in its short form: everything in it holds, and every control goes red."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from case import Control, Outcome, Size
from conserved import Dispatch, Met, astray, twice

ROOT = Path(__file__).parents[1]
TRACED = ["T2b"] if shutil.which("strace") else []


@pytest.mark.timeout(900)  # on cores that others use too; idle ones take a minute or two
@pytest.mark.parametrize(
    ("family", "among"),
    [
        ("crashes", ["T1 ", "T1 ahead", "T2 ", *TRACED, "T3a", "T3b", "T4", "T5a", "T5b", "T18", "T22"]),
        ("failures", ["T6", "T10", "T17"]),
    ],
)
def test_what_had_to_hold_held_and_every_control_went_red(family: str, among: list[str]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "faults"), "--short", "--jobs", "2", "--only", family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"│ {name}" in done.stdout for name in among)
    assert "red" in done.stdout and "GREEN" not in done.stdout and "OF ANOTHER REASON" not in done.stdout


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ((), False),
        (("the engine raised",), False),
        (("the engine raised", "trained twice: a"), True),
    ],
    ids=["green", "red of another reason", "red"],
)
def test_a_control_counts_where_the_check_saw_it_that_had_to(broken: tuple[str, ...], seen: bool) -> None:
    control = Control("no trigger", "trained twice", lambda size: Outcome(1, broken), 1)
    assert bool(control.seen(control.run(Size(1, 0, 1)))) is seen


STARTED = [Dispatch(1, "a", 0, 0), Dispatch(2, "b", 0, 1)]
DONE = [Met(1, 1, "trained", None), Met(2, 1, "dropped", "zero variance")]


@pytest.mark.parametrize(
    ("started", "met", "said"),
    [
        (STARTED, DONE, []),
        (STARTED, DONE[:1], ["b has 0 fates, and was superseded 0 times"]),
        (STARTED, [*DONE, Met(1, 2, "superseded", "resumed")], []),
        (STARTED, [*DONE, Met(1, 2, "superseded", " ")], ["a was superseded without a reason"]),
        (STARTED, [DONE[0], Met(2, 1, "dropped", None)], ["b was dropped without a reason"]),
        (STARTED, [*DONE, Met(1, 2, "trained", None)], ["a has 2 fates, and was superseded 0 times"]),
    ],
    ids=["whole", "no fate", "superseded", "superseded for nothing", "dropped for nothing", "two fates"],
)
def test_what_has_no_single_fate_is_seen(started: list[Dispatch], met: list[Met], said: list[str]) -> None:
    assert list(astray(started, met)) == said


def test_what_is_trained_twice_is_seen_in_the_lineage_where_both_stood() -> None:
    again = [*STARTED, Dispatch(3, "a", 0, 0)]
    undone = [*DONE, Met(1, 2, "superseded", "resumed"), Met(3, 2, "trained", None)]
    assert list(twice(again, undone)) == []
    late = [*DONE, Met(3, 2, "trained", None), Met(1, 3, "superseded", "resumed")]
    assert list(twice(again, late)) == ["trained twice in lineage 2: member 0 of group 0"]
