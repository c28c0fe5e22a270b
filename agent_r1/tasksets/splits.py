"""Divide the questions of a benchmark into training, validation and test questions.

The validation questions are used to choose the best checkpoint. An evaluation reports results on the test questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.tasksets.hub import hub_name, hub_splits, is_hub

SPLITS = ("train", "validation", "test")
WHOLE = "all"
"""The name of an additional split, which contains all questions.

This split exists only if :func:`divide` made the other splits.
"""

_MOST = {"test": 1000, "validation": 128}


class BenchmarkQuestion(Protocol):
    @property
    def text(self) -> str: ...

    def task(self, split: str) -> Task: ...


Question = TypeVar("Question", bound=BenchmarkQuestion)
Splits = Mapping[str, tuple[Question, ...]]
Read = Callable[[Path], tuple[Question, ...]]
"""A function that reads the questions of a file or of a split on the hub. A bad row raises InvalidInput."""

HELD_BACK = ("validation", "dev", "test")
"""Splits of a data set on the hub, in order of preference. The test questions come from the first split that exists.

Use this tuple for benchmarks whose split "test" has no public answers. So "test" is the last choice.
"""

GIVEN_OUT = ("test", "validation", "dev")
"""Splits of a data set on the hub, in order of preference. The test questions come from the first split that exists.

Use this tuple for benchmarks whose split "test" has public answers. So "test" is the first choice.
"""


def read_splits(data: Path, seed: int, read: Read[Question], tested: Sequence[str] = HELD_BACK) -> Splits[Question]:
    """Return the questions of each split in ``data``: a folder, a file, or the name of a data set on the hub.

    A folder has one file per split, such as ``train.jsonl``. If ``read`` accepts folders, a split can also be a folder.
    A single file is divided by :func:`divide`. All questions of the file are also in the split ``WHOLE``. For a data
    set on the hub, see :func:`_hub`.

    Args:
        seed: determines the order of the training questions.
        read: reads the questions of one file, folder or split on the hub.
        tested: names of splits on the hub, in order of preference. The test questions come from the first split that
            exists.

    Raises:
        InvalidInput: a row cannot be read, a folder has no questions or has a question in two splits, or a file has too
            few questions.
    """
    if is_hub(data):
        splits = _hub(data, read, tested)
    else:
        splits = _folder(data, read) if data.is_dir() else _one_part(read(data), data)
    return {**splits, "train": hash_order(splits["train"], str(seed))}


def _one_part(questions: Sequence[Question], source: Path) -> Splits[Question]:
    return {**divide(questions, source), WHOLE: hash_order(questions, "split")}


def whole_split(splits: Splits[Question]) -> str | None:
    """Return ``WHOLE`` if there is a split with this name; else None."""
    return WHOLE if WHOLE in splits else None


def all_questions(splits: Splits[Question]) -> tuple[Question, ...]:
    """Return the questions of all splits except ``WHOLE``."""
    return tuple(chain.from_iterable(questions for split, questions in splits.items() if split != WHOLE))


def tasks_function(splits: Splits[Question], data: Path) -> Callable[[str], Sequence[Task]]:
    """Return a function that returns the tasks of a split. The function raises InvalidInput if the split is empty."""
    tasks = {split: tuple(question.task(split) for question in questions) for split, questions in splits.items()}

    def of(split: str) -> Sequence[Task]:
        if not tasks.get(split):
            there = ", ".join(name for name, some in tasks.items() if some)
            raise InvalidInput(f"split of {data}", got=repr(split), do=f"use one that it has: {there}")
        return tasks[split]

    return of


def divide(questions: Sequence[Question], source: Path) -> Splits[Question]:
    """Divide the questions of one file into test, validation and training.

    Test gets a fifth of the distinct questions, at least 1 and at most 1000. Validation gets a tenth, at least 1 and at
    most 128. A hash of the text decides the split, so the test questions depend on no seed, and equal questions are in
    one split.

    Raise InvalidInput if there are fewer than three distinct questions. The error message names the file ``source``.
    """
    ordered = hash_order(questions, "split")
    texts = list(dict.fromkeys(key(question) for question in ordered))
    if len(texts) < len(SPLITS):
        raise InvalidInput(
            str(source), got=f"{len(texts)} different questions", do="give at least 3, one for each split"
        )
    tests = min(_MOST["test"], max(len(texts) // 5, 1))
    validations = min(_MOST["validation"], max(len(texts) // 10, 1))
    split_of = dict.fromkeys(texts, "train")
    split_of |= dict.fromkeys(texts[:tests], "test")
    split_of |= dict.fromkeys(texts[tests : tests + validations], "validation")
    return {split: tuple(question for question in ordered if split_of[key(question)] == split) for split in SPLITS}


def _hub(data: Path, read: Read[Question], tested: Sequence[str]) -> Splits[Question]:
    """Return the questions of each split of a data set on the hub.

    If the data set has only one split, or ``data`` names a split (``hf:NAME@SPLIT``), :func:`divide` divides this
    split. Otherwise, the questions come from two splits of the data set:

    - The test questions are the questions of the first split in ``tested`` that exists.
    - The validation and training questions come from the split ``train``. First, all test questions are removed from
      this split. A tenth of the remaining questions, but at most 128, become the validation questions. All other
      remaining questions become the training questions.

    Raises InvalidInput if the data set has no split ``train``, or none of the splits in ``tested``.
    """
    name = hub_name(data)
    there = hub_splits(name)
    if name.split is not None or len(there) == 1:
        return _one_part(read(data), data)
    reported = next((split for split in tested if split in there), None)
    if reported is None or "train" not in there:
        do = f"choose one of its splits: {', '.join(f'{data}@{split}' for split in there)}"
        raise InvalidInput("--data", got=f"{data}, which has no train and {tested[0]}", do=do)
    tests = hash_order(read(Path(str(name.at(reported)))), "split")
    rest = exclude(hash_order(read(Path(str(name.at("train")))), "split"), tests)
    validations = rest[: min(_MOST["validation"], len(rest) // 10)]
    return {"train": exclude(rest, validations), "validation": validations, "test": tests}


def exclude(questions: Sequence[Question], others: Sequence[BenchmarkQuestion]) -> tuple[Question, ...]:
    """Return the questions that are not in ``others``, compared by their texts."""
    asked = set(map(key, others))
    return tuple(question for question in questions if key(question) not in asked)


def _folder(folder: Path, read: Read[Question]) -> Splits[Question]:
    splits: dict[str, tuple[Question, ...]] = {}
    for split in SPLITS:
        files = [path for name in (f"{split}.json", f"{split}.jsonl", split) if (path := folder / name).exists()]
        if len(files) > 1:
            raise InvalidInput(str(folder), got=f"{files[0].name} and {files[1].name}", do="keep one of them")
        splits[split] = read(files[0]) if files else ()
    if not any(splits.values()):
        raise InvalidInput(str(folder), got="no question files", do="name them train.json, validation.json, test.json")
    _refuse_shared(splits, folder)
    return splits


def _refuse_shared(splits: Splits[Question], folder: Path) -> None:
    split_of: dict[str, str] = {}
    for split, questions in splits.items():
        for question in questions:
            if split_of.setdefault(key(question), split) != split:
                both = f"{question.text!r} in {split_of[key(question)]} and {split}"
                raise InvalidInput(str(folder), got=both, do="keep every question in one split")


def hash_order(questions: Sequence[Question], salt: str) -> tuple[Question, ...]:
    """Return the questions in an order that looks random but is the same on every machine: sorted by a hash."""
    return tuple(sorted(questions, key=lambda question: hashlib.sha256(f"{salt}|{key(question)}".encode()).digest()))


def key(question: BenchmarkQuestion) -> str:
    """Return the text of a question in lower case and with single spaces. Equal keys mean equal questions."""
    return normalized_text(question.text)


def normalized_text(text: str) -> str:
    return " ".join(text.casefold().split())
