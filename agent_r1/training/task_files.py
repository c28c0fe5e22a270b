"""Tasks from a file of questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, describe_value
from agent_r1.core.task import Task
from agent_r1.tasksets.files import hash_order, normalized_text, read_rows


@dataclass(frozen=True, slots=True)
class _Row:
    record: JsonRecord
    text: str
    answers: tuple[str, ...]

    def task(self, split: str) -> Task:
        name = f"{self.record.path.stem}/{self.record.number}"
        return Task(name, self.text, {**self.record.values, "answers": self.answers}, split)


def tasks_from_jsonl(
    path: str | Path, question: str = "question", answer: str = "answer", validation: float = 0.2, test: float = 0.0
) -> list[Task]:
    """Return one task per row of a JSONL or JSON file, or of a split on the hub (``hf:NAME@SPLIT``).

    ``task.data`` has the fields of the row, and under "answers" its right answers, which ``exact_match`` reads. A
    hash of the question decides the split, the same on each machine, so that equal questions are in one split.

    Args:
        question: the field with the question.
        answer: the field with the answer: a text, a number, or a list of them, each of which is right.
        validation, test: the shares of the questions in the splits "validation" and "test", at least one question each;
            0: none. The others are in "train".
    """
    if not (validation >= 0 <= test and validation + test < 1):
        got = f"shares of {validation} and {test}"
        raise InvalidInput("validation, test", got=got, do="give shares of at least 0, together below 1")
    rows = [_Row(row, row.get_text(question), _answers(row, answer)) for row in read_rows(Path(path))]
    texts = list(dict.fromkeys(normalized_text(row.text) for row in hash_order(rows, "split")))
    split_of = dict.fromkeys(texts, "train")
    for split, share in (("test", test), ("validation", validation)):
        left = [text for text in texts if split_of[text] == "train"]
        split_of |= dict.fromkeys(left[: max(1, round(share * len(texts))) if share else 0], split)
    if "train" not in split_of.values():
        raise InvalidInput(str(path), got=f"{len(texts)} different questions", do="give more, or validation=0")
    return [row.task(split_of[normalized_text(row.text)]) for row in rows]


def _answers(row: JsonRecord, field: str) -> tuple[str, ...]:
    value = row.values.get(field)
    given: Sequence[object] = value if isinstance(value, list) else [value]
    # True and False are integers of Python. As an answer, "True" may be meant, or "yes".
    usable = [one for one in given if isinstance(one, str | int | float) and not isinstance(one, bool)]
    texts = tuple(str(one).strip() for one in usable)
    if not given or len(usable) < len(given) or not all(texts):
        got = f"{field} = {describe_value(value)}" if field in row.values else f"no {field}"
        raise row.error(got, f"give every row a text, a number, or a list of them under {field!r}")
    return texts
