"""Mathematical problems with one right answer, read from the files of benchmarks such as GSM8K and MATH."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, read_record
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasksets.files import read_rows

MOST_WITHOUT_ANSWER = 0.01
"""The largest share of problems without an answer that are left out, with a warning; more are an error."""

log = logging.getLogger(__name__)

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{}$\\]))")
_HASHES = re.compile(r"^#### +(\S.*)$", re.MULTILINE)
_BRACE = re.compile(r"(?:\\\\)|(?:\\[{}])|(?P<brace>[{}])")


def stated_answer(text: str) -> str | None:
    r"""Return the answer that a text states; None if there is no answer.

    The answer is the content of the last complete ``\boxed{..}``. If there is no such box, the answer is the text after
    the last ``#### `` at the start of a line. Blank and unclosed boxes are ignored.

    Example:
        >>> stated_answer(r"Either \boxed{2} or \boxed{\frac{1}{2}}."), stated_answer("So 6 * 3 = 18.\n#### 18")
        ('\\frac{1}{2}', '18')
    """
    hashed = _HASHES.findall(text)
    return boxed_answer(text) or (str(hashed[-1]).rstrip() if hashed else None)


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{..}`` or ``\fbox{..}``, or None.

    A single character needs no braces. A blank box is ignored.

    Example:
        >>> boxed_answer(r"\boxed{\{1, 2\}}"), boxed_answer(r"\boxed 7"), boxed_answer(r"\boxed{1")
        ('\\{1, 2\\}', '7', None)
    """
    # One pass over the braces: a search for each box would take quadratic time if many boxes are not closed.
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found["brace"] == "{":
            opened.append(found.start())
        elif found["brace"] == "}" and opened:
            closing[opened.pop()] = found.start()
    for box in reversed(list(_BOX.finditer(text))):
        # Without a bare character, the match ends with the opening brace of the box.
        answer = box["bare"] or text[box.end() : closing.get(box.end() - 1, box.end())]
        if answer.strip():
            return answer.strip()
    return None


@dataclass(frozen=True, slots=True)
class Problem:
    r"""A mathematical problem. ``answer`` is only the right answer; ``worked`` is the whole solution, or empty.

    Example:
        Problem(id="row-1", text="What is half of a third?", answer=r"\frac{1}{6}")
    """

    id: str
    text: str
    answer: str
    worked: str = ""

    def task(self, split: str) -> Task:
        """Return the problem as a task. The agent sees only ``text``; the rest is in ``Task.data``."""
        data = {"answer": self.answer, "worked": self.worked}
        return Task(f"{split}/{self.id}", (Message.user(self.text),), data, split)


def read_problems(source: Path) -> tuple[Problem, ...]:
    r"""Return the problems in ``source``: a file, a split on the hub, or a folder with one JSON file per problem.

    The fields of a row show its format:

    - GSM8K: ``question``, and ``answer`` with a last line such as ``#### 18``
    - MATH: ``problem``, and ``solution`` with the answer in ``\boxed{..}``
    - MATH-500: the fields of MATH, and ``answer`` with only the answer
    - other files: ``question``, and ``answer`` as a number, a text, or a solution with ``\boxed{..}`` or ``#### ``

    Raises InvalidInput, which names the file and the row, if a row cannot be used.
    """
    problems: dict[str, Problem] = {}
    without_answer: list[InvalidInput] = []
    for row in _rows_below(source) if source.is_dir() else read_rows(source):
        found = _answer(row)
        if isinstance(found, InvalidInput):
            without_answer.append(found)
            continue
        answer, worked = found
        problem = Problem(_id(row, source), row.get_text("question", "problem"), answer, worked)
        if problem.id in problems:
            raise row.error(f"the id {problem.id!r} for a second time", "give every row an id of its own")
        problems[problem.id] = problem
    # Two of the 7,500 training problems of MATH have an empty box.
    if len(without_answer) > len(problems) * MOST_WITHOUT_ANSWER:
        raise without_answer[0]
    for fault in without_answer:
        log.warning("a problem is left out: %s", fault)
    return tuple(problems.values())


def _rows_below(folder: Path) -> Iterator[JsonRecord]:
    paths = sorted(folder.rglob("*.json"))
    if not paths:
        raise InvalidInput(str(folder), got="no JSON files", do="give a folder with one for each problem, or a file")
    yield from map(read_record, paths)


def _id(row: JsonRecord, source: Path) -> str:
    if row.path != source:
        return row.path.relative_to(source).with_suffix("").as_posix()
    named = next((row.values[name] for name in ("unique_id", "id") if row.values.get(name) is not None), None)
    return f"row-{row.number}" if named is None else str(named)


def _answer(row: JsonRecord) -> tuple[str, str] | InvalidInput:
    # Return the answer and the worked solution, or why the row has no answer.
    given, solution = row.values.get("answer"), row.values.get("solution")
    worked = solution if isinstance(solution, str) and stated_answer(solution) is not None else ""
    if isinstance(given, int | float) and not isinstance(given, bool):
        if not math.isfinite(given):
            raise row.error(f"the answer {given}", "give a finite number, or the answer as text")
        return str(given), worked
    told = row.get_text("answer", "solution")
    if "answer" in row.values and "solution" in row.values:
        return told, worked
    answer = stated_answer(told)
    if answer is not None:
        return answer, told
    if "solution" not in row.values and "\n" not in told:
        return told, ""  # a row of ``question`` and ``answer`` with only the answer
    return row.error("no answer in the working", r"end it with a line '#### 18', or put it into \boxed{..}")
