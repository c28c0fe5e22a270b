"""Score right and wrong answers to the benchmarks' own problems.

    python benchmarks/scorers.py [--data ../shared/data] [--every N] [--json]

Code (HumanEval, MBPP), each solution in the sandbox: the solution that comes with a problem has to pass. The function
made to return None, and the next problem's solution under this problem's name, must not pass. Each operator of a
solution is also flipped in turn; flips that the tests do not detect are counted and listed, as a measure of the tests.
Mathematics (GSM8K, MATH): the worked answer that comes with a problem has to be correct. These must not be: the next
problem's answer if its digits differ, the answer plus one, a sum that is not computed, each expression of the question
that differs in form from the answer, and an empty answer. All unexpected scores are listed.
``--every N`` uses every N-th problem. The exit code is 1 if a scorer is wrong.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Scorer, Status, Trajectory, Turn
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code import CodeScorer, code_message, problems as code, return_none
from agent_r1.tasksets.code.problems import packages_for
from agent_r1.tasksets.math import (
    boxed_message,
    copied_expressions,
    have_different_digits,
    plus_one,
    problems as math,
    uncomputed_sum,
)
from agent_r1.tasksets.math.scorer import AnswerChecker, MathScorer

CONCURRENCY = 2
FLIPPED_SECONDS = 3.0
"""Time limit of a solution with a flipped operator, which often loops forever."""


@dataclass(frozen=True, slots=True)
class Count:
    """Of ``tried`` answers of one kind, ``right`` were scored as right; ``odd`` lists the unexpected scores.

    ``p50`` and ``p95`` are milliseconds per scored answer.
    """

    kind: str
    tried: int
    right: int
    odd: tuple[str, ...]
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Case:
    """The text of an answer to a task; ``name`` identifies it in lists."""

    name: str
    task: Task
    text: str


async def count(kind: str, cases: Sequence[Case], scorer: Scorer, reward: str, wanted: float) -> Count:
    """Score every case; a score other than ``wanted`` is odd."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def timed_score(case: Case) -> tuple[object, float]:
        async with slots:
            began = time.perf_counter()
            (rewards,) = await scorer.score([attempt_at(case)], case.task)
            value = rewards[reward]
            assert not isinstance(value, tuple)
            return value, 1000 * (time.perf_counter() - began)

    scores = await asyncio.gather(*map(timed_score, cases))
    odd = tuple(case.name for case, (score, _) in zip(cases, scores, strict=True) if score != wanted)
    times = [spent for _, spent in scores] or [0.0]
    spent = statistics.quantiles(times * 2, n=20, method="inclusive")
    return Count(kind, len(cases), sum(score == 1 for score, _ in scores), odd, spent[9], spent[18])


def attempt_at(case: Case) -> Trajectory:
    """Return an attempt with one action, the text of the case."""
    turn = Turn(0, None, (), (), (), (), "stop", Action(Message.assistant(case.text), case.text))
    return Trajectory(AttemptId("scorers", case.task.id, 0, 0), case.task.id, (turn,), Status.COMPLETED)


# ---- code


def rename_function(other: code.Problem, problem: code.Problem) -> str:
    """Return the other problem's solution with its function renamed to the one that this problem's tests call."""
    tree = ast.parse(other.solution)
    old, new = other.exam.calls[0], problem.exam.calls[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == old:
            node.name = new
        elif isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)


_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Lt, ast.GtE),
    (ast.Gt, ast.LtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
)
FLIPS = dict(_PAIRS) | {new: old for old, new in _PAIRS} | {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}


def flips(source: str) -> Iterator[tuple[str, str]]:
    """Yield the position of each operator, and the source with that operator flipped."""
    for place, node in enumerate(ast.walk(ast.parse(source))):
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.AugAssign) and type(operator(node)) in FLIPS:
            tree = ast.parse(source)
            twin = list(ast.walk(tree))[place]
            new = FLIPS[type(operator(node))]()
            if isinstance(twin, ast.Compare):
                twin.ops[0] = new  # type: ignore[call-overload]
            elif isinstance(twin, ast.BinOp | ast.BoolOp | ast.AugAssign):
                twin.op = new  # type: ignore[assignment]
            where = f"line {node.lineno}, {type(operator(node)).__name__} to {type(new).__name__}"
            yield where, ast.unparse(tree)


def operator(node: ast.Compare | ast.BinOp | ast.BoolOp | ast.AugAssign) -> ast.AST:
    """Return the operator of an expression, the first one of a comparison."""
    return node.ops[0] if isinstance(node, ast.Compare) else node.op


async def count_code(name: str, file: Path, every: int) -> list[Count]:
    found = code.read_problems(file)
    kept, next_ones = found[::every], (found[1:] + found[:1])[::every]
    config = SandboxConfig(packages=packages_for(p.exam for p in found))
    scorer = CodeScorer(Sandbox(config))
    quick = CodeScorer(Sandbox(config.model_copy(update={"limits": Limits(seconds=FLIPPED_SECONDS)})))

    def cases(made: Callable[[code.Problem], str]) -> list[Case]:
        return [Case(p.id, p.task("test"), code_message(made(p)).text) for p in kept]

    others = [
        Case(p.id, p.task("test"), code_message(rename_function(o, p)).text)
        for p, o in zip(kept, next_ones, strict=True)
    ]
    flipped = [
        Case(f"{p.id} {where}", p.task("test"), code_message(source).text)
        for p in kept
        for where, source in flips(p.solution)
    ]
    return [
        await count(f"{name}: its own solutions", cases(lambda p: p.solution), scorer, "passed", 1.0),
        await count(
            f"{name}: return None", cases(lambda p: return_none(p.solution, p.exam.calls)), scorer, "passed", 0.0
        ),
        await count(f"{name}: another problem's solution", others, scorer, "passed", 0.0),
        await count(f"{name}: operator flips", flipped, quick, "passed", 0.0),
    ]


# ---- mathematics


async def count_math(name: str, file: Path, every: int) -> list[Count]:
    found = math.read_problems(file)
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    kept = [(p, row["answer"]) for p, row in zip(found, rows, strict=True)][::every]
    pairs = [
        (p, o) for p, o in zip(found, (*found[1:], found[0]), strict=True) if have_different_digits(p.answer, o.answer)
    ]
    scorer = MathScorer(AnswerChecker())

    def case(chosen: math.Problem, answer: str) -> Case:
        return Case(f"{chosen.id} ({answer} for {chosen.answer})", chosen.task("test"), boxed_message(answer).text)

    copied = [case(p, copy) for p, _ in kept for copy in copied_expressions(p.text, p.answer)]
    working = [Case(f"{p.id} ({p.answer})", p.task("test"), text) for p, text in kept]
    return [
        await count(f"{name}: its own working", working, scorer, "correct", 1.0),
        await count(
            f"{name}: another's answer", [case(p, o.answer) for p, o in pairs[::every]], scorer, "correct", 0.0
        ),
        await count(
            f"{name}: one more", [case(p, more) for p, _ in kept for more in plus_one(p.answer)], scorer, "correct", 0.0
        ),
        await count(
            f"{name}: not added up", [case(p, uncomputed_sum(p.answer)) for p, _ in kept], scorer, "correct", 0.0
        ),
        await count(f"{name}: copied from the question", copied, scorer, "correct", 0.0),
        await count(f"{name}: an empty box", [case(p, "") for p, _ in kept], scorer, "correct", 0.0),
    ]


async def count_all(data: Path, every: int) -> list[Count]:
    parts: list[Awaitable[list[Count]]] = [
        count_code("HumanEval", data / "humaneval_82.jsonl", every),
        count_code("MBPP", data / "mbpp_400.jsonl", every),
        count_math("GSM8K train", data / "gsm8k_train_1000.jsonl", every),
        count_math("GSM8K test", data / "gsm8k_test_300.jsonl", every),
        count_math("MATH", data / "math500_250.jsonl", every),
    ]
    return [count for part in parts for count in await part]


def find_wrong(found: Sequence[Count]) -> list[Count]:
    """Return the kinds that a scorer got wrong. Flips do not count; 1 % of the worked answers may be odd."""
    return [
        kind
        for kind in found
        if not kind.kind.endswith("flips") and len(kind.odd) > (0.01 * kind.tried if "working" in kind.kind else 0)
    ]


def make_table(found: Sequence[Count]) -> Table:
    table = Table("answers", "tried", "right", "odd", "ms, p50", "p95")
    for kind in found:
        table.add_row(
            kind.kind, str(kind.tried), str(kind.right), str(len(kind.odd)), f"{kind.p50:.1f}", f"{kind.p95:.1f}"
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Score right and wrong answers to the problems of benchmarks.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--every", type=int, default=1, help="take every N-th problem")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args()
    found = asyncio.run(count_all(options.data, options.every))
    if options.json:
        print(json.dumps({kind.kind: asdict(kind) for kind in found}))
    else:
        Console().print(make_table(found))
        for kind in found:
            print(f"{kind.kind}: odd are", *(kind.odd or ("none",)), sep="\n  ")
    return 1 if find_wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main())
