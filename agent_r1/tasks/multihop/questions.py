"""Multi-hop questions with their answers, as the benchmarks' files give them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.tasks.multihop.corpus import Passage
from agent_r1.tasks.multihop.reading import Row, read_rows

_CONTEXT = TypeAdapter(list[tuple[str, list[str]]])
_SUPPORTING_FACTS = TypeAdapter(list[tuple[str, int]])
_Second = TypeVar("_Second")


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a question file.

    ``answers`` are all that count as right. ``supporting`` are the titles of the passages that prove
    the answer and ``context`` the passages that came with the question; () where the file has none.

    Example:
        Question("5a7a", "Who leads the party of X?", ("Ann Lee",), supporting=("X", "Y party"), context=(...))
    """

    id: str
    text: str
    answers: tuple[str, ...]
    supporting: tuple[str, ...] = ()
    context: tuple[Passage, ...] = ()

    def task(self, split: str) -> Task:
        """The question as a task. Its data are for scorers and are never shown."""
        data = {"answers": self.answers, "supporting": self.supporting}
        return Task(f"{split}/{self.id}", (Message.user(self.text),), data, split)


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a file of questions; its format is recognised by what its rows hold.

    - HotpotQA's own (also 2WikiMultihopQA's): ``question``, ``answer``, ``context`` as [title, [sentence, ..]]
      pairs, ``supporting_facts`` as [title, sentence number] pairs, ``_id``
    - rows of ``question`` and ``answer``
    - rows of ``Question`` and ``answer`` as a list of all right answers

    Raises InvalidInput, naming the file and the row.
    """
    questions: dict[str, Question] = {}
    for row in read_rows(path):
        question = _question(row)
        if question.id in questions:
            raise row.fault(f"the id {question.id!r} for a second time", "give every row an id of its own")
        questions[question.id] = question
    return tuple(questions.values())


def _question(row: Row) -> Question:
    named = row.values.get("_id", row.values.get("id"))
    return Question(
        id=f"row-{row.number}" if named is None else str(named),
        text=row.text("question", "Question"),
        answers=_answers(row),
        supporting=tuple(dict.fromkeys(title for title, _ in _pairs(row, "supporting_facts", _SUPPORTING_FACTS))),
        context=tuple(
            Passage(title, "".join(sentences).strip()) for title, sentences in _pairs(row, "context", _CONTEXT)
        ),
    )


def _answers(row: Row) -> tuple[str, ...]:
    answer = row.values.get("answer")
    answers = [answer] if isinstance(answer, str) else answer
    if isinstance(answers, list) and answers and all(isinstance(text, str) and text.strip() for text in answers):
        return tuple(text.strip() for text in answers)
    raise row.fault("no answer", "give every row a text, or a list of texts, under 'answer'")


def _pairs(row: Row, name: str, pairs: TypeAdapter[list[tuple[str, _Second]]]) -> list[tuple[str, _Second]]:
    """The pairs under ``name``; [] where the row has none."""
    try:
        return pairs.validate_python(row.values.get(name) or [])
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *fault["loc"])))
        raise row.fault(f"{where}: {fault['msg']}", f"give {name} as HotpotQA's files do") from error
