"""Verdicts: right candidates pass, wrong ones fail, and nobody speaks for the tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.env.sandbox import Ended, Limits, Sandbox, Verdict
from agent_r1.env.sandbox.inside.exam import Opaque, decode, encode

ESCAPES = Path(__file__).parents[2] / "benchmarks" / "escapes.py"


def judge(sandbox: Sandbox, candidate: str, tests: str, **options: Any) -> Verdict:
    return asyncio.run(sandbox.judge(candidate, tests, calls=("f",), **options))


def test_a_right_candidate_passes_and_a_wrong_one_fails(sandbox: Sandbox) -> None:
    tests = "assert f(2, by=3) == (6, [2, 3], {'a': {1.5}})"
    right = "def f(x, by): return (x * by, [x, by], {'a': {1.5}})"
    assert judge(sandbox, right, tests) == Verdict(True)
    assert judge(sandbox, right.replace("*", "+"), tests) == Verdict(False, "AssertionError")


@pytest.mark.parametrize(
    ("candidate", "tests", "reason"),
    [
        ("def f(: pass", "assert f(1)", "SyntaxError"),
        ("def g(x): return x", "assert f(1)", "does not define f"),
        ("import os; os._exit(0)", "assert f(1)", "the process ended"),
        ("def f(x): raise SystemExit(0)", "assert f(1)", "gone"),
        ("def f(x):\n    while True: pass", "assert f(1)", "stopped after 1 seconds"),
        ("def f(x): return bytearray(2**30)", "assert f(1)", "MemoryError"),
        ("def f(x): return x", "assert f(1", "SyntaxError"),
        ("def f(x): return x", "pass", "called nothing"),
        ("def f(x): return x", "f(1)\nraise SystemExit(0)", "did not reach their end"),
        ("def f(x): return object()", "assert f(1)", "no plain data"),
    ],
)
def test_whatever_is_missing_is_a_fail(sandbox: Sandbox, candidate: str, tests: str, reason: str) -> None:
    verdict = judge(sandbox, candidate, tests, limits=Limits(seconds=1))
    assert verdict.passed is False
    assert reason in verdict.reason


def test_errors_of_the_candidate_can_be_expected(sandbox: Sandbox) -> None:
    tests = "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert 'odd' in str(error)"
    assert judge(sandbox, "def f(x): raise ValueError('odd')", tests).passed
    assert not judge(sandbox, "def f(x): return 2", tests).passed


@pytest.mark.parametrize(
    "tests",
    [
        "for a, b in zip([1, 2], map(f, [1, 2])):\n    assert b == a + 1",
        "assert all(map(lambda x: f(x) == x + 1, [1, 2, 3]))",
        "assert list(filter(lambda x: f(x) != x + 1, [1, 2, 3])) == []",
    ],
)
@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "type('Stop', (StopIteration,), {})"])
def test_no_error_of_the_candidate_ends_a_loop_of_the_tests(sandbox: Sandbox, tests: str, error: str) -> None:
    assert judge(sandbox, "def f(x): return x + 1", tests) == Verdict(True)
    assert judge(sandbox, f"def f(x): raise {error}", tests).passed is False


def test_objects_stay_with_the_candidate_and_can_be_handed_back(sandbox: Sandbox) -> None:
    source = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(pairs): return [p.a for p in pairs]"
    )
    verdict = asyncio.run(
        sandbox.judge(source, "assert f([Pair(5, 24), Pair(39, 60)]) == [5, 39]", calls=("f", "Pair"))
    )
    assert verdict == Verdict(True)


def test_tests_may_print_as_much_as_they_like(sandbox: Sandbox) -> None:
    tests = "import sys\nprint('x' * 70000)\nprint('x' * 70000, file=sys.stderr)\nassert f(1) == 2"
    assert judge(sandbox, "def f(x): return 2 * x", tests) == Verdict(True)
    assert judge(sandbox, "def f(x): return x", tests).passed is False


def test_setup_helps_the_tests(sandbox: Sandbox) -> None:
    setup = "import math\ndef double(x): return 2 * x"
    assert judge(sandbox, "def f(x): return x + x", "assert math.isclose(f(3), double(3))", setup=setup).passed


def test_what_could_not_be_judged_is_no_fail(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no more namespaces >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = judge(sandbox, "def f(x): return 1", "assert f(1)")
    assert verdict.passed is None
    assert "no more namespaces" in verdict.reason
    assert asyncio.run(sandbox.run("print(1)")).ended is Ended.NOT_STARTED


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_crosses_unchanged(value: Any) -> None:
    def never(what: Any) -> Any:
        raise AssertionError(what)

    there = decode(json.loads(json.dumps(encode(value, never))), never)
    assert there == value
    assert type(there) is type(value)


def test_what_only_pretends_is_stripped() -> None:
    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    assert type(decode(encode(Yes(3), keep), keep)) is int
    stayed = decode(encode(object(), keep), keep)
    assert isinstance(stayed, Opaque)
    for use in (lambda: stayed == 3, lambda: stayed != 3, lambda: bool(stayed), lambda: {stayed}):
        with pytest.raises(TypeError, match="no plain data"):
            use()


def test_no_attack_and_no_forgery_gets_through_and_the_controls_do(sandbox: Sandbox) -> None:
    done = subprocess.run(
        [sys.executable, str(ESCAPES), "--short", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    known = [] if "cgroup" in sandbox.in_force else ["memory_of_many"]  # docs/sandbox.md: "What is not stopped"
    assert rows["default"]["hits"] == known
    assert rows["verdicts: judge"]["hits"] == []
    assert len(rows["no sandbox"]["hits"]) >= 0.5 * rows["no sandbox"]["tried"]  # root reaches more than others do
    assert len(rows["verdicts: tests beside the candidate"]["hits"]) == 10
