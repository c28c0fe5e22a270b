"""Which questions are for training, which for choosing a checkpoint, and which for the table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.tasks.multihop.hub import hub_name, hub_splits, is_hub
from agent_r1.tasks.multihop.questions import Question, read_questions

SPLITS = ("train", "validation", "test")
_MOST = {"test": 1000, "validation": 128}

Splits = Mapping[str, tuple[Question, ...]]


def read_splits(data: Path, seed: int) -> Splits:
    """The questions of each split; a split may be () where ``data`` is a folder.

    A folder holds a file per split, ``train.json`` or ``train.jsonl`` and so on. A single file is
    divided by :func:`divide`. For a data set on the hub see :func:`_hub`. ``seed`` orders the training questions.

    Raises InvalidInput: see read_questions; a folder without such files; a question in two splits; too few questions.
    """
    splits = _hub(data) if is_hub(data) else _folder(data) if data.is_dir() else divide(read_questions(data), data)
    return {**splits, "train": shuffled(splits["train"], str(seed))}


def divide(questions: Sequence[Question], source: Path) -> Splits:
    """Divide the questions of one file: a fifth, at most 1000, for test, a tenth, at most 128, for
    validation, the rest for training.

    The text of a question decides, by its hash, so that equal questions stay together and the test
    questions of a file are the same for every seed: what one run trained on, no evaluation of it meets.
    """
    ordered = shuffled(questions, "split")
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


def _hub(data: Path) -> Splits:
    """The splits of a data set on the hub that has a training part and one with answers to test on.

    Benchmarks keep the answers of their test part to themselves, so the part called validation or dev is the one that
    papers report and that is tested here; it chooses no checkpoint: for that, training questions are set apart. A data
    set of one split, or one split of a data set (``@``), is divided like a file.
    """
    name = hub_name(data)
    there = hub_splits(name)
    if name.split is not None or len(there) == 1:
        return divide(read_questions(data), data)
    tested = next((split for split in ("validation", "dev", "test") if split in there), None)
    if tested is None or "train" not in there:
        do = f"choose one of its splits: {', '.join(f'{data}@{split}' for split in there)}"
        raise InvalidInput("--data", got=f"{data}, which has no train and validation", do=do)
    tests = shuffled(read_questions(Path(str(name.at(tested)))), "split")
    rest = without(shuffled(read_questions(Path(str(name.at("train")))), "split"), tests)
    validations = rest[: min(_MOST["validation"], len(rest) // 10)]
    return {"train": without(rest, validations), "validation": validations, "test": tests}


def without(questions: Sequence[Question], others: Sequence[Question]) -> tuple[Question, ...]:
    """The questions that are not asked among the others."""
    asked = set(map(key, others))
    return tuple(question for question in questions if key(question) not in asked)


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
            if split_of.setdefault(key(question), split) != split:
                both = f"{question.text!r} in {split_of[key(question)]} and {split}"
                raise InvalidInput(str(folder), got=both, do="keep every question in one split")


def shuffled(questions: Sequence[Question], salt: str) -> tuple[Question, ...]:
    """In the order of their hashes, the same everywhere."""
    return tuple(sorted(questions, key=lambda question: hashlib.sha256(f"{salt}|{key(question)}".encode()).digest()))


def key(question: Question) -> str:
    """What makes two questions the same: their words, whatever their case and spaces."""
    return " ".join(question.text.casefold().split())
