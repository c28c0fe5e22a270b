"""The fields of the benchmarks' rows, checked as they are read."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent_r1.core.jsonl import Row
from agent_r1.retrieval.passages import Passage


class Paragraph(BaseModel):
    """One of MuSiQue's ``paragraphs``."""

    title: str
    paragraph_text: str
    is_supporting: bool = False


class Hop(BaseModel):
    """One step of MuSiQue's ``question_decomposition``: what it comes to."""

    answer: str


T = TypeVar("T")

_CONTEXT = TypeAdapter(list[tuple[str, list[str]]])
_SUPPORTING = TypeAdapter(list[tuple[str, int]])
_EVIDENCES = TypeAdapter(list[tuple[str, str, str]])
_PARAGRAPHS = TypeAdapter(list[Paragraph])
_DECOMPOSITION = TypeAdapter(list[Hop])
_ALIASES = TypeAdapter(list[str])


def answers_of(row: Row) -> tuple[str, ...]:
    """All answers that count as right, with MuSiQue's ``answer_aliases``. Raises InvalidInput where there is none."""
    given = next((row.values[name] for name in ("answer", "answers", "golden_answers") if name in row.values), None)
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise row.fault("no answer", "give every row a text, or a list of texts, under 'answer'")
    aliases = _checked(row, "answer_aliases", _ALIASES, row.values.get("answer_aliases"), "MuSiQue's")
    return tuple(dict.fromkeys(text.strip() for text in (*answers, *aliases) if text.strip()))


def context_of(row: Row) -> tuple[Passage, ...]:
    """HotpotQA's ``context``."""
    pairs = _columns(row.values.get("context"), "title", "sentences")
    return tuple(
        Passage(title, "".join(sentences).strip())
        for title, sentences in _checked(row, "context", _CONTEXT, pairs, "HotpotQA's")
    )


def supporting_of(row: Row) -> list[str]:
    """The titles in HotpotQA's ``supporting_facts``."""
    pairs = _columns(row.values.get("supporting_facts"), "title", "sent_id")
    return [title for title, _ in _checked(row, "supporting_facts", _SUPPORTING, pairs, "HotpotQA's")]


def paragraphs_of(row: Row) -> list[Paragraph]:
    """MuSiQue's ``paragraphs``."""
    return _checked(row, "paragraphs", _PARAGRAPHS, row.values.get("paragraphs"), "MuSiQue's")


def hops_of(row: Row) -> tuple[str, ...]:
    """What the steps come to: the answers of MuSiQue's decomposition, or the objects of 2Wiki's evidences."""
    steps = row.values.get("question_decomposition")
    triples = row.values.get("evidences")
    return (
        *(hop.answer for hop in _checked(row, "question_decomposition", _DECOMPOSITION, steps, "MuSiQue's")),
        *(found for _, _, found in _checked(row, "evidences", _EVIDENCES, triples, "2WikiMultihopQA's")),
    )


def _columns(value: Any, *names: str) -> Any:
    """The hub's columns as rows: ``{"title": ["X"], "sent_id": [0]}`` is ``[["X", 0]]``; anything else as it is."""
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in names):
        return value
    if len({len(value[name]) for name in names}) != 1:
        return value
    return [list(row) for row in zip(*(value[name] for name in names), strict=True)]


def _checked(row: Row, name: str, kind: TypeAdapter[list[T]], value: Any, whose: str) -> list[T]:
    """The value under ``name``; [] where the row has none."""
    try:
        return kind.validate_python(value or [])
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *fault["loc"])))
        raise row.fault(f"{where}: {fault['msg']}", f"give {name} as {whose} files do") from error
