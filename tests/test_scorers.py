"""The scorers on a part of the benchmarks' own files; ``python benchmarks/scorers.py`` uses all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmark_files import SHARED, real_data
from extras import requires
from sandboxed import sandbox_or_skip

from agent_r1.sandbox.config import Limits

SCORERS = Path(__file__).parents[1] / "benchmarks" / "scorers.py"


@real_data
@requires("math_verify", "math")
def test_right_answers_score_1_and_wrong_answers_0() -> None:
    sandbox_or_skip(Limits())
    command = [sys.executable, str(SCORERS), "--data", str(SHARED), "--every", "40", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    own = [count for kind, count in counts.items() if "its own" in kind]
    others = [count for kind, count in counts.items() if "its own" not in kind and "flips" not in kind]
    assert (len(own), len(others)) == (5, 19)
    assert counts["MATH: copied from the question"]["tried"] > 0
    assert all(count["right"] == count["tried"] > 0 for count in own)
    assert all(count["right"] == 0 and (count["tried"] or "copied" in count["kind"]) for count in others)
    flips = [count for kind, count in counts.items() if "flips" in kind]
    assert all(count["right"] < 0.3 * count["tried"] for count in flips)
