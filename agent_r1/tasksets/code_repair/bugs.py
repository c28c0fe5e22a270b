"""Plant bugs into functions, and run the tests in a sandbox to verify that the functions fail."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.examples import Example, example_from_assertion
from agent_r1.tasksets.code.problems import Problem
from agent_r1.tasksets.code_repair.edits import apply_edit
from agent_r1.tasksets.code_repair.mutations import Mutation, mutations, plain_source

_TRIALS = (Path(__file__).parent / "inside" / "trials.py").read_text()
_AT_ONCE = 25
"""The largest number of functions that one program tests. A program tests several functions, because starting a program
takes longer than testing a function."""

_LIMITS = Limits(seconds=300.0, cpu_seconds=5)
"""The limits of a program that tests up to ``_AT_ONCE`` functions."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A function with one planted bug.

    Attributes:
        kind: the kind of the bug, such as "comparison".
        source: the source of the function with the bug.
        right: the source of the function without the bug.
        line: the index of the line with the bug, from 0.
        tests: all tests. The agent sees only the first test; the others are hidden.
        passes: for each hidden test, whether the function with the bug passes. At least one value is False.
        proposals: versions of the whole function, one of which is ``right``. The agent chooses a version. If
            ``proposals`` is (), the agent writes the line without the bug instead.
    """

    problem: Problem
    kind: str
    source: str
    right: str
    line: int
    tests: tuple[Example, ...]
    passes: tuple[bool, ...]
    proposals: tuple[str, ...] = ()

    @property
    def repair(self) -> str:
        """The right answer of the agent, as text.

        If the agent chooses from a numbered list of lines (``proposals`` is not empty), the right answer is a number,
        from 1. Otherwise, the right answer is the line without the bug.
        """
        if self.proposals:
            return str(self.proposals.index(self.right) + 1)
        return self.right.splitlines()[self.line].strip()

    @property
    def exams(self) -> tuple[Exam, ...]:
        """One :class:`Exam` per hidden test."""
        exam = self.problem.exam
        return tuple(Exam(exam.calls, test, exam.setup, exam.given) for test in self.problem.tests[1:])

    def task(self, split: str, number: int) -> Task:
        """Return the task to repair the function.

        The task's text has three parts: the original request for the function, the first test, and the function with
        the bug. If ``proposals`` is not empty, a fourth part is a numbered list of lines, from which the agent chooses
        the right line. ``number`` is the last part of the task's id.
        """
        changed = (_changed_line(self.source, proposal) for proposal in self.proposals)
        menu = "".join(f"\n{index}: {line}" for index, line in enumerate(changed, start=1))
        visible = self.problem.tests[0].strip()
        text = f"{self.problem.request}\n{visible}\n\n{self.source}{menu and chr(10)}{menu}"
        return Task(f"{split}/{self.problem.id}/{number}", (Message.user(text),), {"bug": self}, split)


def _changed_line(source: str, other: str) -> str:
    pairs = zip(source.splitlines(), other.splitlines(), strict=True)
    return next(new.strip() for old, new in pairs if old != new)


@dataclass(frozen=True, slots=True)
class _Function:
    problem: Problem
    source: str
    tests: tuple[Example, ...]
    mutations: tuple[Mutation, ...]


def plant_bugs(
    problems: Sequence[Problem], count: int, lines: int, proposals: int, seed: str, sandbox: Sandbox
) -> tuple[Bug, ...]:
    """Plant bugs in the functions that solve ``problems``. Return at most ``count`` bugs for each function.

    A mutation is a copy of a function with one changed line. A mutation is a bug under three conditions:

    - The first test (the agent sees only this test) and at least one other test fail.
    - No test is unusable, for example because it runs too long.
    - :func:`apply_edit` with the original line restores the function.

    A function gets no bug if it has more than ``lines`` lines, fails its own tests, or has fewer than two tests.

    Args:
        proposals: the maximum number of proposals for each bug. A proposal is a version of the function. The agent
            chooses a proposal. 0: there are no proposals, and the agent writes the line without the bug.
        seed: determines the bugs and the proposals. Equal seeds give equal bugs on every machine.
    """
    functions = [function for problem in problems if (function := _function(problem, lines)) is not None]
    with ThreadPoolExecutor(1) as thread:  # the caller may run in an event loop
        outcomes = thread.submit(asyncio.run, _outcomes(functions, sandbox)).result()
    bugs: list[Bug] = []
    for function, (own, *others) in zip(functions, outcomes, strict=True):
        if set(own) == {"p"}:
            rng = random.Random(f"{seed}/{function.problem.id}")
            bugs += [_propose(bug, proposals, rng) for bug in _draw(list(_bugs(function, others)), count, rng)]
    return tuple(bugs)


def _function(problem: Problem, lines: int) -> _Function | None:
    """Return the function that solves a problem; None if no bug can be planted.

    No bug can be planted in four cases: the function has more than ``lines`` lines; there are fewer than two tests; a
    test is not a single assertion; the tests need code that runs after the function.
    """
    source = plain_source(problem.solution)
    if len(problem.tests) < 2 or problem.exam.after or len(source.splitlines()) > lines:
        return None
    try:
        tests = tuple(example_from_assertion(test) for test in problem.tests)
    except SyntaxError:  # a test that is not one assertion
        return None
    return _Function(problem, source, tests, mutations(source))


def _bugs(function: _Function, outcomes: Sequence[str]) -> Iterator[Bug]:
    """Yield a :class:`Bug` for each mutation that meets the conditions in :func:`plant_bugs`.

    ``outcomes`` has one text per mutation, such as "ppf". A text has one letter per test: "p" (passes), "f" (fails) or
    "x" (unusable).
    """
    for mutation, outcome in zip(function.mutations, outcomes, strict=True):
        visible, hidden = outcome[0], outcome[1:]
        passes = tuple(letter == "p" for letter in hidden)
        bug = Bug(
            function.problem, mutation.kind, mutation.source, function.source, mutation.line, function.tests, passes
        )
        is_bug = visible == "f" and "f" in hidden and "x" not in hidden
        if is_bug and apply_edit(bug.source, (), bug.repair) == bug.right:
            yield bug


def _draw(bugs: list[Bug], count: int, rng: random.Random) -> list[Bug]:
    drawn: list[Bug] = []
    while bugs and len(drawn) < count:
        # First the kind: some kinds have many more mutations than others.
        kind = rng.choice(sorted({bug.kind for bug in bugs}))
        drawn.append(rng.choice([bug for bug in bugs if bug.kind == kind]))
        bugs.remove(drawn[-1])
    return drawn


def _propose(bug: Bug, count: int, rng: random.Random) -> Bug:
    """Return ``bug`` with at most ``count`` proposals, in random order.

    A proposal is a version of the whole function. One proposal is the right function. Each other proposal is the
    function with the bug and one more changed line.
    """
    if count == 0:
        return bug
    others = [one.source for one in mutations(bug.source) if one.source != bug.right]
    chosen = [bug.right, *rng.sample(others, min(count - 1, len(others)))]
    rng.shuffle(chosen)
    return replace(bug, proposals=tuple(chosen))


async def _outcomes(functions: Sequence[_Function], sandbox: Sandbox) -> list[list[str]]:
    """Return one list per function: a text for the function itself, then a text for each mutation.

    A text such as "ppf" has one letter per test: "p" (passes), "f" (fails) or "x" (unusable).
    """
    parts = [functions[start : start + _AT_ONCE] for start in range(0, len(functions), _AT_ONCE)]
    results = await asyncio.gather(*(_run(part, sandbox) for part in parts))
    return [outcome for result in results for outcome in result]


async def _run(functions: Sequence[_Function], sandbox: Sandbox) -> list[list[str]]:
    """Test the functions in one program. If the program fails, test the functions one by one.

    The result has the form of :func:`_outcomes`. If the program of a single function fails, all its tests are "x"
    (unusable).
    """
    variants = [[one.source, *(mutation.source for mutation in one.mutations)] for one in functions]
    tests = [[(test.call, test.wanted) for test in one.tests] for one in functions]
    given = [one.problem.exam.given or one.problem.exam.setup for one in functions]
    program = f"{_TRIALS}\nprint_outcomes({list(zip(given, variants, tests, strict=True))!r})"
    result = await sandbox.run(program, limits=_LIMITS)
    if result.ok:
        outcomes: list[list[str]] = json.loads(result.stdout.text)
        return outcomes
    if len(functions) == 1:
        return [["x" * len(functions[0].tests)] * len(variants[0])]
    return [outcome for function in functions for outcome in await _run([function], sandbox)]
