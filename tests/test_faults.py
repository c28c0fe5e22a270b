"""The table of faults in its short form: everything in it holds, and every control goes red."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(900)  # on cores that others use too; idle ones take a minute or two
@pytest.mark.parametrize(
    ("family", "among"),
    [("crashes", ["T1 ", "T2 ", "T3a", "T3b", "T4", "T5a", "T5b", "T18", "T22"]), ("failures", ["T6", "T10", "T17"])],
)
def test_what_had_to_hold_held_and_every_control_went_red(family: str, among: list[str]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "faults"), "--short", "--jobs", "2", "--only", family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"│ {name}" in done.stdout for name in among)
    assert "red" in done.stdout and "GREEN" not in done.stdout
