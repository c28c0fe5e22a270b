"""Questions that need several facts, with their answers, read from the files of benchmarks such as HotpotQA."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.hub import read_rows_or_hub
from agent_r1.tasksets.multihop.aliases import ALIASES_FILE, read_aliases
from agent_r1.tasksets.multihop.fields import (
    parse_answers,
    parse_context,
    parse_hops,
    parse_paragraphs,
    parse_supporting,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answers, from one row of a question file.

    Attributes:
        answers: the right answers. An agent that gives one of these answers is right.
        supporting: the titles of the passages that prove the answer; () if unknown.
        context: the passages that the row contains; () if the row contains no passages.
        hops: the answers of all steps: the intermediate answers, then the final answer; () if unknown.

    Example:
        Question(id="5a7a", text="Who leads the party of X?", answers=("Ann Lee",), supporting=("X", "Y party"),
                 context=(...), hops=("Y party", "Ann Lee"))
    """

    id: str
    text: str
    answers: tuple[str, ...]
    supporting: tuple[str, ...] = ()
    context: tuple[Passage, ...] = ()
    hops: tuple[str, ...] = ()

    def task(self, split: str) -> Task:
        """Return the question as a task. The agent sees only ``text``. The answers are in ``Task.data``."""
        data = {"answers": self.answers, "supporting": self.supporting, "hops": self.hops}
        return Task(f"{split}/{self.id}", (Message.user(self.text),), data, split)


def read_questions(source: Path) -> tuple[Question, ...]:
    """Return the questions in ``source``: a file, or a split on the hub. The fields of a row show its format:

    - HotpotQA, distractor or fullwiki: ``question``, ``answer``, ``context`` as [title, [sentence, ..]] pairs,
      ``supporting_facts`` as [title, sentence number] pairs, ``_id``
    - 2WikiMultihopQA: the fields of HotpotQA, and also ``evidences`` as [subject, relation, object] triples and
      ``answer_id``. The file ``id_aliases.json`` in the same folder contains other names of the answer by ``answer_id``
    - MuSiQue: ``question``, ``answer``, ``paragraphs``, ``question_decomposition``, ``answer_aliases``, ``answerable``.
      Rows that are not answerable are left out, as in MuSiQue's answer metric
    - these formats on the hub, with ``{"title": [..], "sentences": [..]}`` instead of a list of pairs
    - other files: the question in ``question``, ``Question`` or ``query``, and the answer, or a list of answers, in
      ``answer``, ``answers`` or ``golden_answers``

    Raises InvalidInput, which names the file and the row, if a row cannot be used or no question is answerable.
    """
    questions: dict[str, Question] = {}
    entities: dict[str, str] = {}
    for row in read_rows_or_hub(source):
        if row.values.get("answerable") is False:
            continue
        question = _question(row)
        if question.id in questions:
            raise row.error(f"the id {question.id!r} for a second time", "give every row an id of its own")
        questions[question.id] = question
        if isinstance(entity := row.values.get("answer_id"), str) and entity:
            entities[question.id] = entity
    if not questions:
        raise InvalidInput(str(source), got="no answerable question", do="give a file with at least one")
    return tuple(_with_aliases(questions, entities, source.parent / ALIASES_FILE).values())


def _question(row: JsonRecord) -> Question:
    named = next((row.values[name] for name in ("_id", "id", "query_id") if row.values.get(name) is not None), None)
    paragraphs = parse_paragraphs(row)
    return Question(
        id=f"row-{row.number}" if named is None else str(named),
        text=row.get_text("question", "Question", "query"),
        answers=parse_answers(row),
        supporting=_once([each.title for each in paragraphs if each.is_supporting] or parse_supporting(row)),
        context=tuple(Passage(each.title, each.paragraph_text) for each in paragraphs) or parse_context(row),
        hops=parse_hops(row),
    )


def _once(titles: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(titles))


def _with_aliases(questions: dict[str, Question], entities: dict[str, str], file: Path) -> dict[str, Question]:
    """Return ``questions``, with other names (aliases) of the right answer added to the answers of each question.

    ``entities`` maps the id of a question to the Wikidata id of the answer. ``file`` contains the aliases. If ``file``
    is missing, the questions are returned unchanged.
    """
    if not entities:
        return questions
    if not file.is_file():
        _log.warning("there is no %s: of answers with other names only the one in the questions counts", file)
        return questions
    names = read_aliases(file, set(entities.values()))
    return {
        id: replace(question, answers=_once([*question.answers, *names.get(entities.get(id, ""), ())]))
        for id, question in questions.items()
    }
