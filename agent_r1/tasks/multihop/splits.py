"""Which questions are for training, which for choosing a checkpoint, and which for the table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.tasks.multihop.questions import Question, read_questions

SPLITS = ("train", "validation", "test")
_MOST = {"test": 1000, "validation": 128}

Splits = Mapping[str, tuple[Question, ...]]


def read_splits(data: Path, seed: int) -> Splits:
    """The questions of each split; a split may be () where ``data`` is a folder.

    A folder holds a file per split, ``train.json`` or ``train.jsonl`` and so on. A single file is
    divided by :func:`divide`. ``seed`` orders the training questions.

    Raises InvalidInput: see read_questions; a folder without such files; a question in two splits; too few questions.
    """
    splits = _folder(data) if data.is_dir() else divide(read_questions(data), data)
    return {**splits, "train": _shuffled(splits["train"], str(seed))}


def divide(questions: Sequence[Question], source: Path) -> Splits:
    """Divide the questions of one file: a fifth, at most 1000, for test, a tenth, at most 128, for
    validation, the rest for training.

    The text of a question decides, by its hash, so that equal questions stay together and the test
    questions of a file are the same for every seed: what one run trained on, no evaluation of it meets.
    """
    ordered = _shuffled(questions, "split")
    texts = list(dict.fromkeys(_key(question) for question in ordered))
    if len(texts) < len(SPLITS):
        raise InvalidInput(
            str(source), got=f"{len(texts)} different questions", do="give at least 3, one for each split"
        )
    tests = min(_MOST["test"], max(len(texts) // 5, 1))
    validations = min(_MOST["validation"], max(len(texts) // 10, 1))
    split_of = dict.fromkeys(texts, "train")
    split_of |= dict.fromkeys(texts[:tests], "test")
    split_of |= dict.fromkeys(texts[tests : tests + validations], "validation")
    return {split: tuple(question for question in ordered if split_of[_key(question)] == split) for split in SPLITS}


def _folder(folder: Path) -> Splits:
    splits: dict[str, tuple[Question, ...]] = {}
    for split in SPLITS:
        files = [path for path in (folder / f"{split}.json", folder / f"{split}.jsonl") if path.exists()]
        if len(files) == 2:
            raise InvalidInput(str(folder), got=f"{files[0].name} and {files[1].name}", do="keep one of them")
        splits[split] = read_questions(files[0]) if files else ()
    if not any(splits.values()):
        raise InvalidInput(str(folder), got="no question files", do="name them train.json, validation.json, test.json")
    _refuse_shared(splits, folder)
    return splits


def _refuse_shared(splits: Splits, folder: Path) -> None:
    split_of: dict[str, str] = {}
    for split, questions in splits.items():
        for question in questions:
            if split_of.setdefault(_key(question), split) != split:
                both = f"{question.text!r} in {split_of[_key(question)]} and {split}"
                raise InvalidInput(str(folder), got=both, do="keep every question in one split")


def _shuffled(questions: Sequence[Question], salt: str) -> tuple[Question, ...]:
    """In the order of their hashes, the same everywhere."""
    return tuple(sorted(questions, key=lambda question: hashlib.sha256(f"{salt}|{_key(question)}".encode()).digest()))


def _key(question: Question) -> str:
    """What makes two questions the same: their words, whatever their case and spaces."""
    return " ".join(question.text.casefold().split())
