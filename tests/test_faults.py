"""The fault table with one fault of each kind. ``make faults`` runs more of each, and the controls."""

import shutil
from pathlib import Path

import pytest
from conservation import Fate, Start, find_trained_twice, find_wrong_fates
from fault_case import Control, Outcome, Size
from preloaded import run_python

ROOT = Path(__file__).parents[1]

CHEAP = ["T1", "T5b"]
"""A killed run and a second process. Crashes in a save are also in ``training/test_checkpoint_faults.py``, resumed runs
in ``training/test_resume.py``, and signals in ``training/test_shutdown.py``."""


NEEDS_STRACE = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)"
)


@pytest.mark.parametrize("cases", [CHEAP, pytest.param(["T2b"], marks=NEEDS_STRACE)], ids=["cheap", "system calls"])
def test_every_property_holds_after_one_fault_of_each_kind(cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_python(str(ROOT / "tests" / "faults"), "--smoke", "--only", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"│ {name} " in done.stdout for name in cases)


@pytest.mark.parametrize(
    ("violations", "detected"),
    [
        ((), False),
        (("the engine raised",), False),
        (("the engine raised", "trained twice: a"), True),
    ],
    ids=["no violation", "another violation", "detected"],
)
def test_a_control_counts_only_if_its_own_check_detects_it(violations: tuple[str, ...], detected: bool) -> None:
    control = Control("no trigger", "trained twice", lambda size: Outcome(1, violations), 1)
    assert bool(control.detections(control.run(Size(1, 0, 1)))) is detected


STARTS = [Start(1, "a", 0, 0), Start(2, "b", 0, 1)]
FATES = [Fate(1, 1, "trained", None), Fate(2, 1, "dropped", "zero variance")]


@pytest.mark.parametrize(
    ("starts", "fates", "expected"),
    [
        (STARTS, FATES, []),
        (STARTS, FATES[:1], ["b has 0 fates, and was superseded 0 times"]),
        (STARTS, [*FATES, Fate(1, 2, "superseded", "resumed")], []),
        (STARTS, [*FATES, Fate(1, 2, "superseded", " ")], ["a was superseded without a reason"]),
        (STARTS, [FATES[0], Fate(2, 1, "dropped", None)], ["b was dropped without a reason"]),
        (STARTS, [*FATES, Fate(1, 2, "trained", None)], ["a has 2 fates, and was superseded 0 times"]),
    ],
    ids=["whole", "no fate", "superseded", "superseded without reason", "dropped without reason", "two fates"],
)
def test_attempts_without_exactly_one_fate_are_found(
    starts: list[Start], fates: list[Fate], expected: list[str]
) -> None:
    assert list(find_wrong_fates(starts, fates)) == expected


def test_a_position_trained_twice_is_found_in_the_segment_that_has_both() -> None:
    again = [*STARTS, Start(3, "a", 0, 0)]
    undone = [*FATES, Fate(1, 2, "superseded", "resumed"), Fate(3, 2, "trained", None)]
    assert list(find_trained_twice(again, undone)) == []
    late = [*FATES, Fate(3, 2, "trained", None), Fate(1, 3, "superseded", "resumed")]
    assert list(find_trained_twice(again, late)) == ["trained twice in segment 2: index 0 of group 0"]
