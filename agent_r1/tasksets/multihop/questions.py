"""Questions that need several facts, with their answers, read from the files of benchmarks such as HotpotQA."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, describe_value, read_records
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.files import read_rows

_log = logging.getLogger(__name__)

ALIASES_FILE = "id_aliases.json"


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its right answers, from one row of a question file.

    Attributes:
        answers: the right answers. An agent that gives one of these answers is right.
        supporting: the titles of the passages that prove the answer; () if unknown.
        context: the passages that the row contains; () if the row contains no passages.
        hops: the answers of all steps: the intermediate answers, then the final answer; () if unknown.
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
    for row in read_rows(source):
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


class _Paragraph(BaseModel):
    title: str
    paragraph_text: str
    is_supporting: bool = False


class _Hop(BaseModel):
    answer: str


_COLUMNS = {"context": ("title", "sentences"), "supporting_facts": ("title", "sent_id")}


class _Fields(BaseModel):
    """The fields of HotpotQA, 2WikiMultihopQA (evidences) and MuSiQue (the last three). A missing field is empty."""

    context: list[tuple[str, list[str]]] = []
    supporting_facts: list[tuple[str, int]] = []
    evidences: list[tuple[str, str, str]] = []
    paragraphs: list[_Paragraph] = []
    question_decomposition: list[_Hop] = []
    answer_aliases: list[str] = []

    @field_validator("*", mode="before")
    @classmethod
    def _as_list(cls, value: Any, info: ValidationInfo) -> Any:
        # The hub stores a list of pairs as a dictionary of columns: {"title": ["X", "Y"], "sent_id": [0, 3]} stands for
        # [["X", 0], ["Y", 3]]. What has another form is left for the validation to refuse.
        names = _COLUMNS.get(info.field_name or "", ())
        if names and isinstance(value, dict) and all(isinstance(value.get(name), list) for name in names):
            columns = [value[name] for name in names]
            if len(set(map(len, columns))) == 1:
                return list(zip(*columns, strict=True))
        return value or []


def _fields(row: JsonRecord) -> _Fields:
    try:
        return _Fields.model_validate(row.values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise row.error(f"{where}: {fault['msg']}", f"give {fault['loc'][0]} as the benchmark's files do") from error


def parse_context(row: JsonRecord) -> tuple[Passage, ...]:
    """Return the passages in HotpotQA's field ``context``; () without the field."""
    return tuple(Passage(title, "".join(sentences).strip()) for title, sentences in _fields(row).context)


def _question(row: JsonRecord) -> Question:
    named = next((row.values[name] for name in ("_id", "id", "query_id") if row.values.get(name) is not None), None)
    text = row.get_text("question", "Question", "query")
    field = next((name for name in ("answer", "answers", "golden_answers") if name in row.values), None)
    given = row.values[field] if field else None
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        got = f"{field} = {describe_value(given)}" if field else "no answer"
        raise row.error(got, f"give every row a text, or a list of texts, under {field or 'answer'!r}")
    fields = _fields(row)
    paragraphs, pairs = fields.paragraphs, fields.supporting_facts
    return Question(
        id=f"row-{row.number}" if named is None else str(named),
        text=text,
        answers=_once([name.strip() for name in (*answers, *fields.answer_aliases) if name.strip()]),
        supporting=_once([one.title for one in paragraphs if one.is_supporting] or [title for title, _ in pairs]),
        context=tuple(Passage(one.title, one.paragraph_text) for one in paragraphs) or parse_context(row),
        hops=(*(hop.answer for hop in fields.question_decomposition), *(found for _, _, found in fields.evidences)),
    )


def _once(titles: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(titles))


def read_aliases(path: Path, wanted: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the aliases and demonyms of entities by Wikidata id, for the ids in ``wanted``.

    ``path`` is a file with rows such as ``{"Q_id": "Q183", "aliases": ["BRD"], "demonyms": ["German"]}``. Raises
    InvalidInput, which names the row, if a row cannot be used.
    """
    names: dict[str, tuple[str, ...]] = {}
    for row in read_records(path):
        if (entity := row.get_text("Q_id")) in wanted:
            lists = [row.values.get(field) or [] for field in ("aliases", "demonyms")]
            if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in lists):
                raise row.error("aliases that are no texts", "give aliases and demonyms as lists of texts")
            names[entity] = tuple(name.strip() for each in lists for name in each if name.strip())
    return names


def _with_aliases(questions: dict[str, Question], entities: dict[str, str], file: Path) -> dict[str, Question]:
    # ``entities``: the Wikidata id of the answer, by the id of the question
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
