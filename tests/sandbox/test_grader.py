"""Verdicts: correct candidates pass, wrong ones fail, and no candidate can forge a verdict."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st
from sandboxed import sandbox_or_skip

from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.inside.grader_worker import (
    AlteredArgument,
    decode,
    encode,
    encode_exactly,
    make_exception,
    refuse,
)
from agent_r1.sandbox.process import ExecutionStatus, Verdict
from agent_r1.sandbox.sandbox import Sandbox


def grade(sandbox: Sandbox, candidate: str, tests: str, **options: Any) -> Verdict:
    return asyncio.run(sandbox.grade(candidate, tests, calls=("f",), **options))


def test_a_right_candidate_passes_and_a_wrong_one_fails(sandbox: Sandbox) -> None:
    tests = "assert f(2, by=3) == (6, [2, 3], {'a': {1.5}})"
    right = "def f(x, by): return (x * by, [x, by], {'a': {1.5}})"
    assert grade(sandbox, right, tests) == Verdict(True)
    assert grade(sandbox, right.replace("*", "+"), tests) == Verdict(False, "AssertionError")


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
def test_a_verdict_that_is_missing_is_a_fail(sandbox: Sandbox, candidate: str, tests: str, reason: str) -> None:
    verdict = grade(sandbox, candidate, tests, limits=Limits(seconds=1))
    assert verdict.passed is False
    assert reason in verdict.reason


def test_tests_can_expect_errors_of_the_candidate(sandbox: Sandbox) -> None:
    tests = "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert 'odd' in str(error)"
    assert grade(sandbox, "def f(x): raise ValueError('odd')", tests).passed
    assert not grade(sandbox, "def f(x): return 2", tests).passed


@pytest.mark.parametrize(
    ("tests", "error"),
    [
        ("for a, b in zip([1, 2], map(f, [1, 2])):\n    assert b == a + 1", "StopIteration"),
        ("assert all(map(lambda x: f(x) == x + 1, [1, 2, 3]))", "type('Stop', (StopIteration,), {})"),
        ("assert list(filter(lambda x: f(x) != x + 1, [1, 2, 3])) == []", "StopAsyncIteration"),
    ],
)
def test_no_error_of_the_candidate_ends_a_loop_of_the_tests(sandbox: Sandbox, tests: str, error: str) -> None:
    assert grade(sandbox, "def f(x): return x + 1", tests) == Verdict(True)
    assert grade(sandbox, f"def f(x): raise {error}", tests).passed is False


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("x.sort()", "x = [3, 1, 2]; f(x); assert x == [1, 2, 3]"),
        ("x.append(1); return x", "x = []\nfor _ in 'ab':\n    f(x)\nassert x == [1, 1]"),
        ("x['k'][0] = 5", "x = {'k': [1], 'l': 2}; assert f(x) is None; assert x == {'k': [5], 'l': 2}"),
        ("x.discard(2)", "x = {1, 2}; f(x=x); assert x == {1}"),
        ("x.rotate()", "x = deque([1, 2], 2); f(x); assert x == deque([2, 1]) and x.maxlen == 2"),
        ("x[0] = 66", "x = bytearray(b'a'); f(x); assert x == b'B'"),
        ("x.update('ab')", "x = Counter('a'); f(x); assert x == {'a': 2, 'b': 1}"),
        ("x[:] = [r[::-1] for r in zip(*x)]", "x = [[1, 2], [3, 4]]; y = x; f(x); assert y == [(3, 1), (4, 2)]"),
    ],
)
def test_a_change_of_an_argument_in_place_is_seen_by_the_tests(sandbox: Sandbox, source: str, tests: str) -> None:
    setup = "from collections import Counter, deque"
    assert grade(sandbox, f"def f(x):\n    {source}", tests, setup=setup) == Verdict(True)
    assert grade(sandbox, "def f(x): pass", tests, setup=setup).passed is False


@pytest.mark.parametrize(
    "tests",
    [
        "x = [3, 1]; assert f(x) == sorted(x)",
        "x = [3, 1]\ny = f(x)\nassert y == sorted(x)",
        "x = {'a': 1}; assert list(f(x)) == list(x)",
    ],
)
def test_a_candidate_cannot_empty_what_its_result_is_compared_with(sandbox: Sandbox, tests: str) -> None:
    assert grade(sandbox, "def f(x): return sorted(x)", tests) == Verdict(True)
    assert grade(sandbox, "def f(x): x.clear(); return []", tests).passed is False
    assert grade(sandbox, "def f(x): x.clear()", tests).passed is False


@pytest.mark.parametrize(("kind", "parent"), [("Own", "ValueError"), ("Further", "LookupError")])
def test_an_exception_class_of_the_candidate_becomes_its_builtin_parent(
    sandbox: Sandbox, kind: str, parent: str
) -> None:
    source = f"class Own({parent}): pass\nclass Further(Own): pass\ndef f(kind): raise globals()[kind]('odd')"
    tests = "try:\n    f({kind!r})\n    assert False\nexcept {caught} as error:\n    assert 'odd' in str(error)"
    assert grade(sandbox, source, tests.format(kind=kind, caught=parent)) == Verdict(True)
    assert grade(sandbox, source, tests.format(kind=kind, caught="TypeError")).passed is False


@pytest.mark.parametrize("parent", ["StopIteration", "SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_no_exception_of_the_candidate_exits_the_tests(parent: str) -> None:
    assert isinstance(make_exception({"raised": [parent, "BaseException"], "message": "odd"}), RuntimeError)


def test_objects_stay_with_the_candidate_and_can_be_passed_back(sandbox: Sandbox) -> None:
    source = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(pairs): return [p.a for p in pairs]"
    )
    verdict = asyncio.run(
        sandbox.grade(source, "assert f([Pair(5, 24), Pair(39, 60)]) == [5, 39]", calls=("f", "Pair"))
    )
    assert verdict == Verdict(True)


def test_output_of_the_tests_does_not_affect_the_verdict(sandbox: Sandbox) -> None:
    tests = "import sys\nprint('x' * 70000)\nprint('x' * 70000, file=sys.stderr)\nassert f(1) == 2"
    assert grade(sandbox, "def f(x): return 2 * x", tests) == Verdict(True)
    assert grade(sandbox, "def f(x): return x", tests).passed is False


def test_setup_helps_the_tests(sandbox: Sandbox) -> None:
    setup = "import math\ndef double(x): return 2 * x"
    assert grade(sandbox, "def f(x): return x + x", "assert math.isclose(f(3), double(3))", setup=setup).passed


def test_a_sandbox_that_does_not_start_gives_no_verdict(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no more namespaces >&2; exit 1\n", "utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = grade(sandbox, "def f(x): return 1", "assert f(1)")
    assert verdict.passed is None
    assert "no more namespaces" in verdict.reason
    assert asyncio.run(sandbox.run("print(1)")).status is ExecutionStatus.NOT_STARTED


def test_deeply_nested_values_are_transferred(sandbox: Sandbox) -> None:
    nested = "def made(n):\n    r = []\n    for _ in range(n): r = [r]\n    return r\n"
    count = "def f(r):\n    d = 0\n    while r: r, d = r[0], d + 1\n    return d\n"
    given = f"{count.replace(' f(', ' g(')}assert g(f(900)) == 900"
    assert grade(sandbox, nested.replace("made", "f"), given) == Verdict(True)
    assert grade(sandbox, nested.replace("made", "f").replace("range(n)", "range(1)"), given).passed is False
    assert grade(sandbox, count, f"{nested}assert f(made(900)) == 900") == Verdict(True)


def test_the_recursion_limit_of_the_candidate_is_that_of_python(sandbox: Sandbox) -> None:
    source = "def f():\n    try: return 1 + f()\n    except RecursionError: return 0"
    assert grade(sandbox, source, "assert 900 < f() < 1000") == Verdict(True)


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.fractions()
NUMBERS |= st.decimals(allow_nan=False)
DATES = (
    st.datetimes()
    | st.datetimes().map(lambda when: when.replace(fold=1))
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
KEYS = st.text() | st.integers()
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | DATES | st.text() | st.binary() | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers()).map(Counter)
        | st.dictionaries(KEYS, inner).map(lambda made: defaultdict(list, made))
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_is_transferred_unchanged(value: Any) -> None:
    def never(what: Any) -> Any:
        raise AssertionError(what)

    decoded = decode(json.loads(json.dumps(encode(value, never))), never)
    assert decoded == value
    assert type(decoded) is type(value)
    assert not isinstance(value, datetime.datetime | datetime.time) or decoded.fold == value.fold
    assert encode_exactly(decoded) == encode(value, never)  # so that tests can pass back any value of a candidate


class Named(NamedTuple):
    x: int


CHANGED = [
    Named(1),
    defaultdict(lambda: 5),
    defaultdict(None),
    memoryview(b"a"),
    lambda: 1,
    object(),
    HTTPStatus,
    [].append,
    math.sqrt,
    eval,
    HTTPStatus.OK,
    datetime.datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")),
    datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "Alba")),
]


@pytest.mark.parametrize("value", CHANGED, ids=lambda value: type(value).__name__)
def test_an_argument_that_would_change_is_rejected(value: Any) -> None:
    for held in (value, [value], {"a": (1, deque([value]))}, iter([value])):
        with pytest.raises(AlteredArgument, match="would arrive at the candidate as something else"):
            encode_exactly(held)


@pytest.mark.parametrize("value", [int, dict, type, type(None), OSError, KeyError, StopIteration, len, sorted, max])
def test_builtin_types_and_functions_are_transferred_by_name(value: Any) -> None:
    for held in (value, [value], {"a": (1, deque([value]))}):
        if value is type(None):  # no name in Python gives it
            with pytest.raises(AlteredArgument):
                encode_exactly(held)
        else:
            decoded = decode(json.loads(json.dumps(encode_exactly(held))), refuse)
            assert decoded == held and type(decoded) is type(held)


def test_tests_can_hand_over_types_and_functions(sandbox: Sandbox) -> None:
    candidate = """
def f(xs, kind):
    if kind is len:
        return sorted(xs, key=kind)
    if kind is KeyError:
        raise kind("no")
    return tuple(x for x in xs if not isinstance(x, kind))
"""
    tests = """
assert f((4, 5, 7.7), int) == (7.7,) and f(('a', 2), (str, float)) == (2,)
assert f(['ccc', 'a', 'bb'], kind=len) == ['a', 'bb', 'ccc']
try:
    f([], KeyError)
except KeyError:
    pass
else:
    assert False
"""
    assert grade(sandbox, candidate, tests) == Verdict(True)
    assert grade(sandbox, "def f(xs, kind): return xs", tests).passed is False


def test_a_type_that_the_candidate_returns_equals_only_itself(sandbox: Sandbox) -> None:
    tests = "assert f([1, 'a']) == [int, str]"
    assert grade(sandbox, "def f(xs): return [type(x) for x in xs]", tests) == Verdict(True)
    for wrong in ("[str, int]", "[object, object]", "['int', 'str']", "[type('int', (), {}), str]", "[eval, exec]"):
        assert grade(sandbox, f"def f(xs): return {wrong}", tests).passed is False


def test_a_candidate_that_changes_its_builtins_changes_no_others(sandbox: Sandbox) -> None:
    liar = "import builtins\nbuiltins.sum = lambda x: 7\ndef f(k): return [k, sum([])]"
    assert grade(sandbox, liar, "assert f(int)[0]('5') == 5 and f(sum)[0]([1]) == 1 and sum([]) == 0") == Verdict(True)
    assert grade(sandbox, liar, "assert f(sum)[1] == 0").passed is False


@pytest.mark.parametrize(
    "source",
    [
        "assert f(Point(1, 2)) == 1",
        "assert f([{'a': Point(1, 2)}]) == 1",
        "try:\n    f(lambda x: x)\nexcept BaseException:\n    pass",
        "assert f(b=defaultdict(lambda: 5)) == 6",
        "assert f(1) == 1\nassert f(object()) == 1",
    ],
)
def test_tests_with_such_an_argument_give_no_verdict(sandbox: Sandbox, source: str) -> None:
    verdict = grade(sandbox, "def f(b): return 1", f"{IMPORTS}\n{source}")
    assert verdict.passed is None and "the tests hand over " in verdict.reason
    assert grade(sandbox, "def f(b): return 1", source, setup=IMPORTS).passed is None


def test_a_candidate_cannot_prevent_a_verdict(sandbox: Sandbox) -> None:
    values = "Point(1, 2), defaultdict(lambda: 5), object(), f, iter('ab'), type('S', (str,), {})('a')"
    tests = "for i in range(6):\n    assert f(f(i)) != 'never'"
    candidate = f"{IMPORTS}\ndef f(i): return ({values})[i if type(i) is int else 0]"
    assert grade(sandbox, candidate, tests) == Verdict(True)  # each value can be passed back
    assert grade(sandbox, candidate, tests.replace("!=", "==")).passed is False
    writer = "import os\nos.write(2, b'0' * 32 + b' the tests hand over nothing')\ndef f(b): return 2"
    assert grade(sandbox, writer, "assert f(1) == 1").passed is False


IMPORTS = """
import datetime, itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
Point = namedtuple("Point", "x y")
"""
HONEST = [
    ("Fraction(1, 3)", "Fraction(1, 4)"),
    ("Decimal('1.50')", "Decimal('1.51')"),
    ("{'a': 1}.keys()", "{'b': 1}.keys()"),
    ("{'a': 1}.items()", "{'a': 2}.items()"),
    ("range(3)", "range(4)"),
    ("1 + 2j", "1 - 2j"),
    ("b'ab'", "b'ac'"),
    ("bytearray(b'ab')", "bytearray(b'a')"),
    ("memoryview(b'ab')", "memoryview(b'ac')"),
    ("datetime.datetime(2020, 1, 2, 3, 4, 5, 6)", "datetime.datetime(2020, 1, 2)"),
    (
        "datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))",
        "datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)",
    ),
    ("datetime.datetime(2020, 1, 2, fold=1).fold", "datetime.datetime(2020, 1, 2).fold"),
    ("datetime.date(2020, 1, 2)", "datetime.date(2020, 1, 3)"),
    ("datetime.time(1, 2)", "datetime.time(1, 3)"),
    ("datetime.timedelta(-1, 2, 3)", "datetime.timedelta(1, 2, 3)"),
    ("Point(1, 2)", "Point(1, 3)"),
    ("Counter('aab')", "Counter('ab')"),
    ("defaultdict(list, {1: [2]})", "defaultdict(list, {1: [3]})"),
    ("OrderedDict([(1, 2), (3, 4)])", "OrderedDict([(3, 4), (1, 2)])"),
    ("deque([1, 2], maxlen=3)", "deque([2, 1], maxlen=3)"),
    ("frozenset({1, 2})", "frozenset({1})"),
    ("{'a': [Fraction(1, 2), (deque([{1}]), Counter('b'))]}", "{'a': [Fraction(1, 2), (deque([{2}]), Counter('b'))]}"),
]


def test_return_values_are_compared_with_their_type(sandbox: Sandbox) -> None:
    pairs = f"{IMPORTS}\nPAIRS = [{', '.join(f'({value}, {other})' for value, other in HONEST)}]"
    tests = "for i, (value, other) in enumerate(PAIRS):\n    assert f(i) == value and not f(i) == other, value"
    assert grade(sandbox, f"{pairs}\ndef f(i): return PAIRS[i][0]", tests, setup=pairs) == Verdict(True)
    tests = "for i, (value, _) in enumerate(PAIRS):\n    assert not f(i) == value, value"
    assert grade(sandbox, f"{pairs}\ndef f(i): return PAIRS[i][1]", tests, setup=pairs) == Verdict(True)


def test_iterators_arrive_as_what_they_yield(sandbox: Sandbox) -> None:
    values = "enumerate('ab'), itertools.chain([(0, 'a')], [(1, 'b')]), iter({0: 'a', 1: 'b'}.items())"
    tests = "assert all(list(f(i)) == [(0, 'a'), (1, 'b')] for i in range(3))"
    assert grade(sandbox, f"{IMPORTS}\ndef f(i): return ({values})[i]", tests) == Verdict(True)


ARGUMENTS = [
    ("b[0] = 65; return b", "bytearray(b'xy')", "b'Ay'"),
    ("return b * 2", "Fraction(1, 3)", "Fraction(2, 3)"),
    ("b.appendleft(0); return list(b)", "deque([1])", "[0, 1]"),
    ("b['k'].append(1); return b", "defaultdict(list)", "{'k': [1]}"),
    ("return b['none']", "Counter('a')", "0"),
    ("return sorted(b)", "{2: 1, 1: 0}.values()", "[0, 1]"),
]


def test_arguments_arrive_with_their_type(sandbox: Sandbox) -> None:
    bodies = "\n".join(f"def g{i}(b): {body}" for i, (body, _, _) in enumerate(ARGUMENTS))
    tests = "\n".join(f"assert f({i}, {given}) == {wanted}" for i, (_, given, wanted) in enumerate(ARGUMENTS))
    assert grade(sandbox, f"{bodies}\ndef f(i, b): return globals()[f'g{{i}}'](b)", f"{IMPORTS}\n{tests}") == Verdict(
        True
    )


def test_numpy_values_arrive_as_python_values() -> None:
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    sandbox_or_skip(Limits())
    with_numpy = Sandbox(SandboxConfig(packages=(Path(np.__file__).parents[1],)))
    values = "[np.longdouble(1.5), np.clongdouble(1j), np.int64(3), np.bool_(True), np.array([[1, 2]])]"
    candidate = f"import numpy as np\ndef f(): return {values}"
    assert grade(with_numpy, candidate, "assert f() == [1.5, 1j, 3, True, [[1, 2]]]") == Verdict(True)
    assert grade(with_numpy, candidate, "assert f()[-1] != [[1, 2]]") == Verdict(False, "AssertionError")
    handed = "import numpy as np\nassert f(np.int64(3)) == 3"
    assert grade(with_numpy, candidate.replace("f()", "f(b)"), handed).passed is None
