"""Problems with one right answer, as the benchmarks' files give them: GSM8K, MATH."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.jsonl import Row, read_object
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.hub import rows_of
from agent_r1.tasksets.math.answers import stated_answer


@dataclass(frozen=True, slots=True)
class Problem:
    r"""One row of a file of problems. ``answer`` is the gold one, as mathematics without the working.

    Example:
        Problem("row-1", "What is half of a third?", r"\frac{1}{6}")
    """

    id: str
    text: str
    answer: str

    def task(self, split: str) -> Task:
        """The problem as a task. Its data are for scorers and are never shown."""
        return Task(f"{split}/{self.id}", (Message.user(self.text),), {"answer": self.answer}, split)


def read_problems(source: Path) -> tuple[Problem, ...]:
    r"""Read a file of problems, a split on the hub (see ``tasks.hub``), or a folder with a file for each problem.

    What a row holds tells its format:

    - GSM8K's own: ``question``, and ``answer`` whose last line is ``#### 18``
    - MATH's own: ``problem``, and ``solution`` with the answer in ``\boxed{..}``; one file for each problem, in folders
    - MATH-500's: the same, with the bare answer under ``answer``
    - rows of ``question`` and ``answer``, bare (a number may be one in JSON too) or worked, with a box

    Raises InvalidInput, naming the file and the row.
    """
    problems: dict[str, Problem] = {}
    for row in _rows_below(source) if source.is_dir() else rows_of(source):
        problem = Problem(_id(row, source), row.text("question", "problem"), _answer(row))
        if problem.id in problems:
            raise row.fault(f"the id {problem.id!r} for a second time", "give every row an id of its own")
        problems[problem.id] = problem
    return tuple(problems.values())


def _rows_below(folder: Path) -> Iterator[Row]:
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise InvalidInput(str(folder), got="no JSON files", do="give a folder with one for each problem, or a file")
    yield from map(read_object, paths)


def _id(row: Row, source: Path) -> str:
    if row.path != source:
        return row.path.relative_to(source).with_suffix("").as_posix()
    named = next((row.values[name] for name in ("unique_id", "id") if row.values.get(name) is not None), None)
    return f"row-{row.number}" if named is None else str(named)


def _answer(row: Row) -> str:
    number = row.values.get("answer")
    if isinstance(number, int | float) and not isinstance(number, bool):
        return str(number)
    bare = "solution" in row.values and "answer" in row.values
    told = row.text("answer") if bare else row.text("solution", "answer")
    answer = told if bare else stated_answer(told)
    if answer is None and "solution" not in row.values and "\n" not in told:
        answer = told  # a bare answer
    if answer is None:
        raise row.fault("no answer in the working", r"end it with a line '#### 18', or put it into \boxed{..}")
    return answer
