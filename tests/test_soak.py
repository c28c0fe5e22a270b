"""The soak test in a short form: it passes, and detects a run that leaks files. It is too short to judge memory."""

import re
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

from preloaded import run_python
from random_faults import Faults
from soak import PATIENT, ResourceWatch, Sample, SoakIsOver, SoakResult

SCRIPT = Path(__file__).parent / "faults" / "soak.py"


def soak(*options: str) -> CompletedProcess[str]:
    return run_python(str(SCRIPT), "--steps", "2", "--groups", "2", "--patient", *options)


def test_a_run_with_random_faults_and_a_stop_stays_valid_and_leaks_nothing() -> None:
    done = soak("--staleness", "1", "--stops", "1", "--rate", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds;" in done.stdout and re.search(r"invariants\s+│ hold", done.stdout)
    assert re.search(r"segments\s+│ 2", done.stdout)
    kinds = re.findall(r"│ {3}(open|step|close|tool|engine) \S", done.stdout)
    assert set(kinds) == {"open", "step", "close", "tool", "engine"}


def test_a_leak_is_detected() -> None:
    watch = ResourceWatch(60.0, steps=2, stops=0)
    watch.steps, watch.samples = [1.0], [Sample(0.0, 1.0, 10, 5), Sample(1.0, 1.0, 20, 5)]
    report: Any = SimpleNamespace(violations=())
    result = SoakResult(watch, PATIENT, SoakIsOver("over"), Faults(0.0, 0, True), report, {}, 0, 0.0)
    assert list(result.violations()) == ["10 more files are open"]
