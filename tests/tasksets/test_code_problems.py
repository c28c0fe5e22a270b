"""Files of programming problems in the benchmarks' own formats; hidden tests stay hidden."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.config import SandboxConfig
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code import trial_program
from agent_r1.tasksets.code.problems import Exam, Problem, packages_for, read_problems
from agent_r1.tasksets.code.source import Example, example_from_assertion, examples_from_docstring, parse_source

PROMPT = (
    "from typing import List\n\ndef scale(x):\n    return 3 * x\n\n\n"
    'def area(sides: List[int]) -> int:\n    """ The area.\n    >>> area([2, 3])\n    6\n    """\n'
)
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": PROMPT,
    "entry_point": "area",
    "canonical_solution": "    return sides[0] * sides[1]\n",
    "test": "def check(candidate):\n    assert candidate([4, 5]) == 20\n    assert candidate([scale(1), 1]) == 3\n",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function to double.",
    "code": "import math\r\ndef double(x):\r\n  return 2 * x",
    "test_list": ["assert double(1) == 2", "assert double(5) == 10", "assert math.isclose(double(0.5), 1.0)"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
SANITIZED = {key: value for key, value in MBPP.items() if key not in ("text", "test_setup_code")} | {
    "prompt": MBPP["text"],
    "test_imports": ["import math"],
    "source_file": "x.ipynb",
}
EVALPLUS = HUMANEVAL | {"base_input": [[[4, 5]]], "plus_input": [[[1, 1]]], "contract": "assert sides", "atol": 0}
TREES = {
    "task_id": 367,
    "text": "Write a function to add the leaves up.",
    "code": "class Node:\n  def __init__(self, x):\n    self.x, self.kids = x, []\n"
    "def leaves(n):\n  return sum(map(leaves, n.kids)) if n.kids else n.x",
    "test_setup_code": "root = Node(1)\nroot.kids = [Node(2), Node(3)]\none = Node(4)",
    "test_list": ["assert leaves(root) == 5", "assert leaves(one) == 4"],
}


def only(path: Path) -> Problem:
    (problem,) = read_problems(path)
    return problem


def judged(sandbox: Sandbox, problem: Problem, solution: str) -> Verdict:
    return asyncio.run(problem.exam.judge(sandbox, solution))


@pytest.mark.parametrize("row", [HUMANEVAL, MBPP, SANITIZED, EVALPLUS, TREES])
def test_every_format_is_read_and_graded(row: Any, sandbox: Sandbox, rows_file: Callable[..., Path]) -> None:
    problem = only(rows_file(row))
    assert judged(sandbox, problem, problem.solution) == Verdict(True)
    name = problem.exam.calls[0] if row is not TREES else "leaves"
    assert (
        judged(sandbox, problem, f"def {name}(x): return None\nclass Node:\n  def __init__(self, x): pass").passed
        is False
    )
    assert judged(sandbox, problem, "").passed is False


def test_the_prompt_and_the_examples_of_a_problem(rows_file: Callable[..., Path]) -> None:
    assert only(rows_file(HUMANEVAL)).text.startswith("Write the function area.\n\n```python\nfrom typing")
    assert only(rows_file(HUMANEVAL)).examples == (Example("area([2, 3])", "6"),)
    for row in (MBPP, SANITIZED):
        problem = only(rows_file(row))
        assert problem.id == "MBPP/7"
        assert problem.text == f"{MBPP['text']}\n\nFor example:\n\n```python\nassert double(1) == 2\n```"
        assert problem.examples == (Example("double(1)", "2"),)


@pytest.mark.parametrize("row", [HUMANEVAL, MBPP, SANITIZED, EVALPLUS, TREES])
def test_hidden_tests_are_not_visible_to_the_agent_or_its_tool(row: Any, rows_file: Callable[..., Path]) -> None:
    problem = only(rows_file(row))
    visible = "".join(message.text for message in problem.task("test").messages)
    visible += trial_program("pass", problem.exam, problem.examples)
    hidden = row["test_list"][1:] if "test_list" in row else [row["test"]]
    assert hidden and not [test for test in hidden if test in visible]
    assert problem.solution not in visible


def test_a_solution_may_use_the_prompts_helpers_and_future_imports(sandbox: Sandbox, rows_file: Any) -> None:
    problem = only(rows_file(HUMANEVAL))
    source = "from __future__ import annotations\ndef area(s: List[int]): return s[0] * s[1] * scale(2) // 6"
    assert judged(sandbox, problem, source).passed


def test_random_tests_draw_the_same_numbers_each_time(sandbox: Sandbox) -> None:
    exam = Exam(("f",), "import random\ndrawn = [f(random.random()) for _ in range(3)]\nassert False, drawn")
    first, second = (asyncio.run(exam.judge(sandbox, "def f(x): return x")) for _ in range(2))
    assert first == second and first.reason.startswith("AssertionError: [0.")


@pytest.mark.parametrize(
    "forgery",
    [
        "import os; os._exit(0)",
        "def double(x):\n  class Yes(int):\n    __eq__ = lambda self, other: True\n  return Yes(0)",
        "def handed_by_name(name): return 2\ndef double(x): return handed_by_name",
        "import builtins; builtins.compile = builtins.exec = lambda *a: None\ndouble = str",
        "print('passed')\nraise SystemExit(0)",
    ],
)
def test_a_forged_solution_fails(forgery: str, sandbox: Sandbox, rows_file: Any) -> None:
    assert judged(sandbox, only(rows_file(MBPP)), forgery).passed is False


def test_packages_that_tests_import_are_mounted_in_the_sandbox(sandbox: Sandbox, rows_file: Any) -> None:
    test = f"import numpy as np\n{HUMANEVAL['test']}    assert np.allclose(candidate([1, 2]), 2.0)\n"
    problem = only(rows_file(HUMANEVAL | {"test": test}))
    packages = packages_for([problem.exam])
    assert [folder.name for folder in packages] == ["site-packages"]
    assert not judged(sandbox, problem, problem.solution).passed  # without the package
    assert judged(Sandbox(SandboxConfig(packages=packages)), problem, problem.solution).passed
    assert packages_for([only(rows_file(MBPP)).exam]) == ()
    with pytest.raises(InvalidInput, match="tests that import no_such_package, which is not installed"):
        packages_for([Exam((), "import no_such_package.inner")])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "Who?", "answer": "Ann"}, "got no tests; give rows of HumanEval (entry_point"),
        (MBPP | {"code": "def double(x:"}, "code that is not Python"),
        (MBPP | {"test_list": ["assert True"]}, "tests that call nothing of the code"),
        (MBPP | {"test": "assert double(9) == 18"}, "MBPP+'s field test, which is not run"),
        (MBPP | {"test_list": "assert double(1)"}, "test_list = 'assert double(1)' (string), no list of texts"),
        (HUMANEVAL | {"prompt": 3}, "prompt = 3 (integer), no text"),
        (HUMANEVAL | {"test": " "}, "got no tests; give rows of HumanEval (entry_point"),
        (HUMANEVAL | {"test": "def check(:"}, "code that is not Python"),
    ],
)
def test_an_invalid_row_is_reported_with_its_number(row: Any, expected: str, rows_file: Callable[..., Path]) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_problems(rows_file(row))
    assert "row 1" in str(caught.value) and expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "tests", "examples"),
    [
        ("f = lambda x: x + 1", ["assert f(1) == 2", "assert f(2) == 3"], (Example("f(1)", "2"),)),
        ("def f(x): return x + 1", ["x = 1; assert f(x) == 2", "assert f(2) == 3"], ()),
    ],
)
def test_an_unusual_row_is_a_valid_problem(
    code: str, tests: list[str], examples: Any, sandbox: Sandbox, rows_file: Any
) -> None:
    problem = only(rows_file(MBPP | {"code": code, "test_list": tests}))
    assert problem.examples == examples and tests[0] in problem.text and problem.exam.calls == ("f",)
    assert judged(sandbox, problem, code) == Verdict(True)
    assert judged(sandbox, problem, "def f(x): return x").passed is False


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("import sys\ndef f(x): return sys.getsizeof(x)", "assert f((1, 'a', 2.5)) == sys.getsizeof((1, 'a', 2.5))"),
        ("import cmath\ndef f(x): return x * cmath.pi", "assert f(2) == 2 * cmath.pi"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == Counter('aab')"),
        ("import re as r\ndef f(x): return x[:1]", "assert r.fullmatch('a', f('ab'))"),
        ("import os.path\ndef f(x): return x + '/b'", "assert os.path.basename(f('a')) == 'b'"),
        ("from math import *\ndef f(x): return x + 1", "assert f(floor(2.5)) == 3"),
    ],
)
def test_tests_can_use_what_the_solution_imports(code: str, test: str, sandbox: Sandbox, rows_file: Any) -> None:
    problem = only(rows_file(MBPP | {"code": code, "test_list": [test]}))
    assert judged(sandbox, problem, code) == Verdict(True)
    assert judged(sandbox, problem, "def f(x): return None").passed is False


@pytest.mark.parametrize(
    ("source", "example"),
    [
        ("assert f([1]) == [2, 3]", Example("f([1])", "[2, 3]")),
        ("assert set(f(1)) == {2}", Example("set(f(1))", "{2}")),
        ("assert not f(1)", Example("bool(not f(1))", "True")),
        ("assert 1 < f(1) < 3", Example("bool(1 < f(1) < 3)", "True")),
    ],
)
def test_an_assertion_becomes_an_example(source: str, example: Example) -> None:
    assert example_from_assertion(source) == example


@pytest.mark.parametrize(
    ("docs", "examples"),
    [
        (">>> f(1)\n    2\n    >>> f(3)\n    4", [("f(1)", "2"), ("f(3)", "4")]),
        ('f([1, "a)"]) ➞ (2, 3) # as 1 is less', [('f([1, "a)"])', "(2, 3)")]),
        ("f(1) == 2\n    f(2) => [3].\n    f(3) returns None", [("f(1)", "2"), ("f(2)", "[3]"), ("f(3)", "None")]),
        ("for any n f(n) = 3, and f(1) is unknown", []),
        ('f(1) == ""broken"', []),
        ("nothing", []),
    ],
)
def test_examples_are_read_from_docstrings(docs: str, examples: list[tuple[str, str]]) -> None:
    source = f"def f(x):\n    '''Docs.\n    {docs}\n    '''"
    assert [(example.call, example.wanted) for example in examples_from_docstring(source, "f")] == examples


@real_data
@pytest.mark.parametrize(("name", "count", "bare"), [("humaneval_82.jsonl", 82, 15), ("mbpp_400.jsonl", 400, 0)])
def test_the_benchmarks_own_files_are_read(name: str, count: int, bare: int) -> None:
    problems = read_problems(SHARED / name)
    assert len(problems) == count
    assert sum(not problem.examples for problem in problems) <= bare  # without an example to try a solution on
    assert all(parse_source(problem.solution).body for problem in problems)
