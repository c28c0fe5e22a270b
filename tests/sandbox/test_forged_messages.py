"""What a candidate forges on its connection to the grader, and objects that pretend to be equal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.sandbox.inside.grader_worker import Opaque, decode, encode
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox


def grade(sandbox: Sandbox, candidate: str, tests: str) -> Verdict:
    return asyncio.run(sandbox.grade(candidate, tests, calls=("f",)))


LIES = [
    {"defaultdict": ["eval", {"dict": []}]},
    {"counter": "aab"},
    {"deque": [[1], "many"]},
    {"fraction": ["0x1", "0x0"]},
    {"decimal": ["__import__('os')"]},
    {"datetime": {"int": "0x1"}},
    {"timedelta": [1e300]},
    {"keys": [{"list": []}]},
    {"Opaque": 1},
    {"kept": 0},
    {"list": [1], "dict": []},
    ["no form"],
]


def test_a_forged_message_on_the_connection_fails(sandbox: Sandbox) -> None:
    async def all_of() -> list[Verdict]:
        tests = "assert f() == 1"
        return await asyncio.gather(*(sandbox.grade(lying(lie), tests, calls=("f",)) for lie in LIES))

    assert [verdict.passed for verdict in asyncio.run(all_of())] == [False] * len(LIES)


def lying(message: Any) -> str:
    """Return a candidate that replaces the encoding of its return values."""
    return f"import sys\nsys._getframe(1).f_globals['encode'] = lambda value, keep: {message!r}\ndef f(): return 2"


def test_such_a_message_does_reach_the_tests(sandbox: Sandbox) -> None:
    assert grade(sandbox, lying({"int": "0x1"}), "assert f() == 1") == Verdict(True)


def test_a_forged_change_of_an_argument_is_not_applied_beside_a_result(sandbox: Sandbox) -> None:
    forging = """import sys
module = sys._getframe(1).f_globals
send = module["send"]
module["send"] = lambda connection, reply: send(connection, reply | {"left": [{"list": []}]})
"""
    assert grade(sandbox, f"{forging}def f(x): return []", "x = [3, 1]; assert f(x) == sorted(x)").passed is False
    # Control: the forged change does reach tests that read the argument.
    assert grade(sandbox, f"{forging}def f(x): return []", "x = [3, 1]; f(x); assert x == []") == Verdict(True)


def test_objects_that_pretend_to_be_equal_lose_that() -> None:
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
