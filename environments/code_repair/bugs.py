"""Plant bugs into functions, and run the tests in a sandbox to verify that the functions fail."""

from __future__ import annotations

import ast
import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.sandbox.config import Limits
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.problems import Exam, Problem
from agent_r1.tasksets.code.source import Example, example_from_assertion, parse_source

SIMILAR = 0.5
"""The minimum similarity (``SequenceMatcher`` ratio, 0 to 1) of a new line and the line that it replaces."""


def replace_line(source: str, index: int, line: str) -> str:
    """Return the source with ``line`` at ``index``, with the indentation of the replaced line."""
    lines = source.splitlines()
    indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    lines[index] = indentation + line.strip()
    return "\n".join(lines)


def most_similar_line(source: str, line: str) -> int | None:
    """Return the index of the first line in ``source`` that is most similar to ``line``; None below ``SIMILAR``."""
    lines = [old.strip() for old in source.splitlines()]
    ratios = [SequenceMatcher(None, old, line.strip(), autojunk=False).ratio() for old in lines]
    best = max(range(len(lines)), key=ratios.__getitem__)
    return best if ratios[best] >= SIMILAR else None


def apply_edit(source: str, proposals: tuple[str, ...], text: str) -> str | None:
    """Return the source of a function after an edit; None if the edit is invalid or changes nothing.

    With ``proposals`` (versions of the whole function), the edit ``text`` is the number of a proposal, from 1. Without
    proposals, ``text`` is a line, which replaces the most similar line of ``source``.
    """
    text = text.strip()
    if proposals:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0
        return proposals[number - 1] if 1 <= number <= len(proposals) else None
    index = most_similar_line(source, text) if text and "\n" not in text else None
    edited = None if index is None else replace_line(source, index, text)
    return None if edited == source else edited


COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}

OPERATORS: Mapping[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add, ast.Pow),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Div, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}

ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
"""The operators whose operands a mutation swaps. With other operators, a swap rarely changes the value."""

NAMES: Mapping[str, str] = {"min": "max", "max": "min", "any": "all", "all": "any", "upper": "lower", "lower": "upper"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A copy of a function with one changed line. ``line`` is the index of this line, from 0."""

    kind: str
    line: int
    source: str


def mutations(source: str) -> tuple[Mutation, ...]:
    """Return all mutations of a function, without repetitions, in the order of the syntax tree.

    Each mutation differs from the function in exactly one line. ``source`` must be a text from :func:`plain_source`.

    Example:
        >>> [mutation.source.splitlines()[1].strip() for mutation in mutations("def f(x):\\n    return x < 2")]
        ['return x <= 2', 'return x > 2', 'return x < 3', 'return x < 1']
    """
    tree, lines = parse_source(source), source.splitlines()
    found: dict[str, Mutation] = {}
    for kind, changed in _changed_sources(tree):
        others = changed.splitlines()
        if len(others) != len(lines):
            continue
        different = [index for index, (old, new) in enumerate(zip(lines, others, strict=True)) if old != new]
        if len(different) == 1:
            found.setdefault(changed, Mutation(kind, different[0], changed))
    return tuple(found.values())


def plain_source(source: str) -> str:
    """Return the source as ``ast.unparse`` writes it: no comments, one statement per line."""
    return ast.unparse(parse_source(source))


def _changed_sources(tree: ast.Module) -> Iterator[tuple[str, str]]:
    # Each change is made in the tree itself, and is undone afterwards.
    for parent in list(ast.walk(tree)):
        for name, value in list(ast.iter_fields(parent)):
            if isinstance(value, list):
                for index, node in enumerate(list(value)):
                    for kind, other in _alternatives(node):
                        value[index] = other
                        yield kind, ast.unparse(ast.fix_missing_locations(tree))
                        value[index] = node
            else:
                for kind, other in _alternatives(value):
                    setattr(parent, name, other)
                    yield kind, ast.unparse(ast.fix_missing_locations(tree))
                    setattr(parent, name, value)


def _alternatives(node: object) -> Iterator[tuple[str, ast.AST]]:
    """Yield (kind of the change, replacement) for each node that can replace ``node``."""
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", _with(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BinOp(op=op, left=left, right=right):
            yield from (("operator", _with(node, op=other())) for other in OPERATORS.get(type(op), ()))
            if isinstance(op, ORDERED):
                yield "swap", _with(node, left=right, right=left)
        case ast.AugAssign(op=op):
            yield from (("operator", _with(node, op=other())) for other in OPERATORS.get(type(op), ()))
        case ast.BoolOp(op=op):
            yield "boolean", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "negation", operand
        case ast.If(test=ast.UnaryOp(op=ast.Not())) | ast.While(test=ast.UnaryOp(op=ast.Not())):
            return
        case ast.If(test=test) | ast.While(test=test):
            yield "negation", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", ast.Constant(other)) for other in (value + 1, value - 1) if other >= 0)
        case ast.Call(args=[first, second]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            yield "swap", _with(node, args=[second, first])
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "slice", _with(node, lower=None)
            if upper is not None:
                yield "slice", _with(node, upper=None)
            if lower is None and upper is not None:
                yield "slice", _with(node, lower=ast.Constant(1))
        case ast.Name(id=name) if name in NAMES:
            yield "name", _with(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield "name", _with(node, attr=NAMES[name])


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


_TRIALS = (Path(__file__).parent / "trials.py").read_text("utf-8")
_AT_ONCE = 25
"""The largest number of functions that one program tests. Starting a program takes longer than testing a function."""

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
        """The right answer of the agent: the number of a proposal, from 1, or the line without the bug."""
        if self.proposals:
            return str(self.proposals.index(self.right) + 1)
        return self.right.splitlines()[self.line].strip()

    @property
    def exams(self) -> tuple[Exam, ...]:
        """One :class:`Exam` per hidden test."""
        exam = self.problem.exam
        return tuple(Exam(exam.calls, test, exam.setup, exam.given) for test in self.problem.tests[1:])

    def task(self, split: str, number: int) -> Task:
        """Return the task to repair the function: the original request, the first test, the function with the bug and,
        with ``proposals``, a numbered list of lines. ``number`` is the last part of the task's id.
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

    A mutation is a bug under three conditions:

    - The first test (the agent sees only this test) and at least one other test fail.
    - No test is unusable, for example because it runs too long.
    - :func:`apply_edit` with the original line restores the function.

    A function gets no bug if it has more than ``lines`` lines, fails its own tests, or has fewer than two tests.

    Args:
        proposals: the maximum number of proposals for each bug; 0: the agent writes the line without the bug.
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
    source = plain_source(problem.solution)
    if len(problem.tests) < 2 or problem.exam.after or len(source.splitlines()) > lines:
        return None
    try:
        tests = tuple(example_from_assertion(test) for test in problem.tests)
    except SyntaxError:  # a test that is not one assertion
        return None
    return _Function(problem, source, tests, mutations(source))


def _bugs(function: _Function, outcomes: Sequence[str]) -> Iterator[Bug]:
    # ``outcomes``: a text per mutation, with a letter per test: "p" (passes), "f" (fails) or "x" (unusable)
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
    # One proposal is the right function. Each other is the function with the bug and one more changed line.
    if count == 0:
        return bug
    others = [one.source for one in mutations(bug.source) if one.source != bug.right]
    chosen = [bug.right, *rng.sample(others, min(count - 1, len(others)))]
    rng.shuffle(chosen)
    return replace(bug, proposals=tuple(chosen))


async def _outcomes(functions: Sequence[_Function], sandbox: Sandbox) -> list[list[str]]:
    # One list per function: a text such as "ppf" for the function itself, then for each mutation
    parts = [functions[start : start + _AT_ONCE] for start in range(0, len(functions), _AT_ONCE)]
    results = await asyncio.gather(*(_run(part, sandbox) for part in parts))
    return [outcome for result in results for outcome in result]


async def _run(functions: Sequence[_Function], sandbox: Sandbox) -> list[list[str]]:
    # If the program fails, the functions are tested one by one. If that of a single function fails, all its tests are
    # unusable.
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
