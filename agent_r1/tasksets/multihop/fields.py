"""Read and validate the fields of a row in the files of the benchmarks."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from agent_r1.core.files import JsonRecord
from agent_r1.retrieval.retriever import Passage


class Paragraph(BaseModel):
    """One paragraph in MuSiQue's field ``paragraphs``."""

    title: str
    paragraph_text: str
    is_supporting: bool = False


class Hop(BaseModel):
    """One step of the reasoning in MuSiQue's field ``question_decomposition``."""

    answer: str


T = TypeVar("T")

_CONTEXT = TypeAdapter(list[tuple[str, list[str]]])
_SUPPORTING = TypeAdapter(list[tuple[str, int]])
_EVIDENCES = TypeAdapter(list[tuple[str, str, str]])
_PARAGRAPHS = TypeAdapter(list[Paragraph])
_DECOMPOSITION = TypeAdapter(list[Hop])
_ALIASES = TypeAdapter(list[str])


def parse_answers(row: JsonRecord) -> tuple[str, ...]:
    """Return the right answers, with MuSiQue's ``answer_aliases``. Raises InvalidInput if the row has no answer."""
    given = next((row.values[name] for name in ("answer", "answers", "golden_answers") if name in row.values), None)
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise row.error("no answer", "give every row a text, or a list of texts, under 'answer'")
    aliases = _checked(row, "answer_aliases", _ALIASES, row.values.get("answer_aliases"), "MuSiQue's")
    return tuple(dict.fromkeys(text.strip() for text in (*answers, *aliases) if text.strip()))


def parse_context(row: JsonRecord) -> tuple[Passage, ...]:
    """Return the passages in HotpotQA's field ``context``; () without the field."""
    pairs = _columns(row.values.get("context"), "title", "sentences")
    return tuple(
        Passage(title, "".join(sentences).strip())
        for title, sentences in _checked(row, "context", _CONTEXT, pairs, "HotpotQA's")
    )


def parse_supporting(row: JsonRecord) -> list[str]:
    """Return the titles in HotpotQA's field ``supporting_facts``; [] without the field."""
    pairs = _columns(row.values.get("supporting_facts"), "title", "sent_id")
    return [title for title, _ in _checked(row, "supporting_facts", _SUPPORTING, pairs, "HotpotQA's")]


def parse_paragraphs(row: JsonRecord) -> list[Paragraph]:
    """Return the paragraphs in MuSiQue's field ``paragraphs``; [] without the field."""
    return _checked(row, "paragraphs", _PARAGRAPHS, row.values.get("paragraphs"), "MuSiQue's")


def parse_hops(row: JsonRecord) -> tuple[str, ...]:
    """Return the answer of each hop; () if the row does not contain these answers.

    The answers come from MuSiQue's ``question_decomposition`` or from the triples in 2WikiMultihopQA's ``evidences``.
    """
    steps = row.values.get("question_decomposition")
    triples = row.values.get("evidences")
    return (
        *(hop.answer for hop in _checked(row, "question_decomposition", _DECOMPOSITION, steps, "MuSiQue's")),
        *(found for _, _, found in _checked(row, "evidences", _EVIDENCES, triples, "2WikiMultihopQA's")),
    )


def _columns(value: Any, *names: str) -> Any:
    """Convert a dictionary of columns to a list of rows. ``names`` are the keys of the columns.

    Return ``value`` unchanged if ``value`` is not such a dictionary, or if the columns have different lengths.

    Example:
        >>> _columns({"title": ["X", "Y"], "sent_id": [0, 3]}, "title", "sent_id")
        [['X', 0], ['Y', 3]]
    """
    if not isinstance(value, dict) or not all(isinstance(value.get(name), list) for name in names):
        return value
    if len({len(value[name]) for name in names}) != 1:
        return value
    return [list(row) for row in zip(*(value[name] for name in names), strict=True)]


def _checked(row: JsonRecord, name: str, kind: TypeAdapter[list[T]], value: Any, whose: str) -> list[T]:
    """Return ``value`` as a validated list; [] if ``value`` is empty or None.

    Args:
        name: the field of ``row`` that contains ``value``.
        whose: the possessive of the format's name, such as "MuSiQue's".

    Raises InvalidInput if ``value`` is invalid. The message contains ``name`` and ``whose``, as in "give paragraphs as
    MuSiQue's files do".
    """
    try:
        return kind.validate_python(value or [])
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *fault["loc"])))
        raise row.error(f"{where}: {fault['msg']}", f"give {name} as {whose} files do") from error
