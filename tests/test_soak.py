"""The soak in its short form, which is too short to judge memory: it holds, and a run that leaks files does not."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--minutes", "0.1", "--deadline", "5", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_run_among_faults_keeps_its_ledger_in_balance_and_leaks_nothing() -> None:
    done = soak()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds;" in done.stdout and "balances" in done.stdout
    kinds = re.findall(r"│ {3}(open|step|close|tool|engine) \S", done.stdout)
    assert set(kinds) == {"open", "step", "close", "tool", "engine"}


def test_acting_ahead_stopped_and_resumed_it_keeps_its_ledger_in_balance_too() -> None:
    done = soak("--staleness", "1", "--stops", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds;" in done.stdout and re.search(r"lineages\s+│ 2", done.stdout)


def test_a_leak_is_seen() -> None:
    done = soak("--leak")
    assert done.returncode == 1 and "more files are open" in done.stdout, done.stdout
