"""Programming problems with tests, as in the files of HumanEval and MBPP."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, describe_value
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.source import (
    Example,
    assigned_names,
    defined_names,
    example_from_assertion,
    examples_from_docstring,
    imported_packages,
    imports_of,
    parse_source,
    used_names,
)
from agent_r1.tasksets.files import read_rows

_HAND = "handed_by_name"
_HANDER = f"\ndef {_HAND}(name, names=globals()): return names[name]\n"
_SEEDED = "import random\nrandom.seed(0)\n"


@dataclass(frozen=True, slots=True)
class Exam:
    """The trusted code that tests an untrusted solution. The tests and the solution run in two processes.

    Attributes:
        calls: the names that the solution must define.
        tests: the hidden tests.
        setup: code that runs before the tests, in the process of the tests.
        given: code that runs before the solution, in the process of the solution.
        after: code that runs after the solution, in the process of the solution.
        handed: the names of objects that the tests get from the process of the solution. The code in the attribute
            ``after`` creates these objects from classes of the solution. The tests can use the objects only as
            arguments of the solution's functions.

    Example:
        Exam(calls=("area",), tests="assert area(square) == 4", after="square = Square(2)", handed=("square",))
    """

    calls: tuple[str, ...]
    tests: str
    setup: str = ""
    given: str = ""
    after: str = ""
    handed: tuple[str, ...] = ()

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        """Test a solution in a sandbox, and return the verdict."""
        handing = "".join(f"{name} = {_HAND}({name!r})\n" for name in self.handed)
        calls = (*self.calls, _HAND) if self.handed else self.calls
        # The same random numbers for every solution: a reward must not depend on luck.
        seeded = _SEEDED if "random" in self.tests else ""
        return await sandbox.grade(
            self._candidate(solution), handing + self.tests, calls=calls, setup=f"{self.setup}\n{seeded}"
        )

    def _candidate(self, solution: str) -> str:
        # Each source is compiled by itself, so that a solution can begin with "from __future__".
        after = self.after + (_HANDER if self.handed else "")
        parts = [(source, name) for source, name in zip((self.given, solution, after), _FILES, strict=True) if source]
        return "\n".join(f"exec(compile({source!r}, {name!r}, 'exec'))" for source, name in parts)


_FILES = ("given.py", "solution.py", "after.py")


def packages_for(exams: Iterable[Exam]) -> tuple[Path, ...]:
    """Return the folders of the packages that hidden tests import, for ``SandboxConfig.packages``.

    Raises InvalidInput if a package is not installed.
    """
    packages = {name for exam in exams for name in imported_packages(f"{exam.setup}\n{exam.tests}")}
    folders = set()
    for name in sorted(packages - set(sys.stdlib_module_names)):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise InvalidInput(
                "--data", got=f"tests that import {name}, which is not installed", do=f"pip install {name}"
            )
        folders.add(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0])
    return tuple(sorted(folders))


_FORMATS = "HumanEval (entry_point, test, ..) or MBPP (code, test_list, ..)"


@dataclass(frozen=True, slots=True)
class Problem:
    """A programming problem: one row of a file.

    Attributes:
        text: the request to the agent, with the public examples.
        solution: a right solution.
        request: the request without the public example (MBPP only).
        tests: the tests one by one (MBPP only).

    Example:
        Problem(id="MBPP/1", text="Write a function to add.\\nFor example: assert add(1, 2) == 3",
                examples=(Example("add(1, 2)", "3"),), exam=Exam(("add",), "assert add(2, 2) == 4"),
                solution="def add(a, b): return a + b")
    """

    id: str
    text: str
    examples: tuple[Example, ...]
    exam: Exam
    solution: str
    request: str = ""
    tests: tuple[str, ...] = ()

    def task(self, split: str) -> Task:
        """Return the problem as a task. The agent does not see the data of the task."""
        data = {"examples": self.examples, "exam": self.exam, "solution": self.solution}
        return Task(f"{split}/{self.id}", (Message.user(self.text),), data, split)


def read_problems(source: Path) -> tuple[Problem, ...]:
    """Read a file of problems, or a split on the hub.

    The fields of a row decide its format. Unknown fields are ignored.

    - HumanEval: ``task_id``, ``prompt``, ``entry_point``, ``test``, ``canonical_solution``
    - MBPP: ``task_id``, ``text``, ``code``, ``test_list``, ``test_setup_code``
    - MBPP, sanitized: ``prompt`` replaces ``text``, and ``test_imports`` replaces ``test_setup_code``

    Rows of MBPP+ are refused, because the additional tests in their field ``test`` would not run. Raises InvalidInput,
    which names the file and the row, if a row cannot be used.
    """
    problems: dict[str, Problem] = {}
    for row in read_rows(source):
        try:
            problem = _humaneval(row) if "entry_point" in row.values else _mbpp(row)
        except (SyntaxError, ValueError) as error:
            raise row.error(f"code that is not Python ({error})", "fix that row") from error
        if problem.id in problems:
            raise row.error(f"the id {problem.id!r} for a second time", "give every row an id of its own")
        problems[problem.id] = problem
    return tuple(problems.values())


def _humaneval(row: JsonRecord) -> Problem:
    # The prompt runs before the tests and before the solution: both can use its imports and functions.
    name, prompt, test = row.get_text("entry_point"), _source(row, "prompt"), _source(row, "test")
    if not test.strip():
        raise row.error("no tests", f"give rows of {_FORMATS}")
    exam = Exam((name,), f"{test}\ncheck({name})", setup=prompt, given=prompt)
    text = f"Write the function {name}.\n\n```python\n{prompt.strip()}\n```"
    solution = prompt + _source(row, "canonical_solution")
    for source in (exam.tests, solution):
        parse_source(source)
    return Problem(row.get_text("task_id"), text, examples_from_docstring(prompt, name), exam, solution)


def _mbpp(row: JsonRecord) -> Problem:
    # The first test is public; all tests grade.
    tests = _texts(row, "test_list")
    if not tests:
        raise row.error("no tests", f"give rows of {_FORMATS}")
    if _source(row, "test").strip():
        do = "leave test out to be judged by test_list only, or give MBPP's own rows"
        raise row.error("MBPP+'s field test, which is not run", do)
    solution = _source(row, "code")
    setup = "\n".join([*_texts(row, "test_imports"), _source(row, "test_setup_code")]).strip()
    written = defined_names(solution)
    read = used_names("\n".join(tests))
    # The benchmark runs solution and tests in one process: the tests can use what the solution imports.
    imports = imports_of(solution, read)
    if written & used_names(setup):  # the setup code uses names that the solution defines
        shown = tuple(sorted(assigned_names(setup) & read))
        exam = Exam(_named(written, tests), "\n".join(tests), imports, after=setup, handed=shown)
    else:
        exam = Exam(_named(written, tests), "\n".join(tests), f"{imports}\n{setup}".strip())
    if not exam.calls:
        raise row.error("tests that call nothing of the code", "fix that row")
    request = row.get_text("text", "prompt")
    text = f"{request}\n\nFor example:\n\n```python\n{tests[0].strip()}\n```"
    name = f"MBPP/{row.values.get('task_id', row.number)}"
    return Problem(name, text, _shown(tests[0]), exam, solution, request, tuple(tests))


def _shown(test: str) -> tuple[Example, ...]:
    statements = parse_source(test.strip()).body
    return (example_from_assertion(test),) if len(statements) == 1 and isinstance(statements[0], ast.Assert) else ()


def _named(written: set[str], tests: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(written & used_names("\n".join(tests))))


def _source(row: JsonRecord, name: str) -> str:
    value = row.values.get(name) or ""
    if not isinstance(value, str):
        raise row.error(f"{name} = {describe_value(value)}, no text", f"give {name} as the benchmark's files do")
    return value.replace("\r\n", "\n")


def _texts(row: JsonRecord, name: str) -> list[str]:
    value = row.values.get(name) or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise row.error(f"{name} = {describe_value(value)}, no list of texts", f"give {name} as MBPP's files do")
    return value
