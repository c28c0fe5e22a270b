"""A mixture of data sets, described by a TOML file.

Training draws ``count`` questions from each training data set. An evaluation reports each test data set separately.

Example:

    [train.hotpotqa]
    data = "hotpot_train_v1.1.json"
    count = 25600

    [train.2wiki]
    data = "hf:xanhho/2WikiMultihopQA@train"
    count = 25600

    [test.hotpotqa]
    data = "hotpot_dev_fullwiki_v1.json"

    [test.musique]
    data = "musique_ans_v1.0_dev.jsonl"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.files import Splits, exclude, hash_order, locate_data, read_settings_file
from agent_r1.tasksets.multihop.questions import Question, read_questions

RESERVED = ("train", "validation", "all")
"""Names that no data set of a mixture may have: each test data set becomes a split with the name of the data set."""


_Drawn = dict[str, tuple[Question, ...]]


class Portion(BaseModel):
    """Questions of the data set ``data``: ``count`` random questions, or all questions if ``count`` is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    count: int | None = Field(default=None, ge=1)


class MixtureFile(BaseModel):
    """The content of a mixture file: for each split, a mapping from the name of a data set to a :class:`Portion`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: dict[str, Portion] = Field(default_factory=dict)
    validation: dict[str, Portion] = Field(default_factory=dict)
    test: dict[str, Portion] = Field(min_length=1)


def read_mixture(path: Path, seed: int) -> tuple[Splits[Question], tuple[str, ...]]:
    """Return the questions by split, and the names of the test splits: one per test data set, such as "hotpotqa".

    Only the training questions depend on ``seed``. Training, validation and test share no question. A relative path in
    the file begins at the folder of the file.

    Raises InvalidInput if the file is malformed, or a data set cannot be read or has too few questions.
    """
    file = read_settings_file(MixtureFile, path)
    if reserved := sorted({*file.train, *file.validation, *file.test} & set(RESERVED)):
        raise InvalidInput(f"{path}, {reserved[0]}", got="a data set of that name", do="give it another")
    read = lru_cache(
        lambda data: read_questions(locate_data(path, Path(data)))
    )  # several portions can share a data set

    def draw(split: str, portions: Mapping[str, Portion], salt: str, held: Sequence[Question]) -> _Drawn:
        drawn = {}
        for name, portion in portions.items():
            there = exclude(hash_order(read(portion.data), salt), held)
            wanted = len(there) if portion.count is None else portion.count
            if not there or wanted > len(there):
                got = f"{wanted} questions wanted of {portion.data}, which has {len(there)} not held for another split"
                do = "lower its count, or give more questions"
                raise InvalidInput(f"{path}, {split}.{name}", got=got, do=do)
            drawn[name] = tuple(replace(question, id=f"{name}/{question.id}") for question in there[:wanted])
        return drawn

    tests = draw("test", file.test, "split", ())
    held = _joined(tests)
    validations = draw("validation", file.validation, "split", held)
    trained = draw("train", file.train, str(seed), (*held, *_joined(validations)))
    # Mix the data sets. Otherwise all questions of the first data set would come before the other questions.
    train = hash_order(_joined(trained), f"mixed by {seed}")
    return {"train": train, "validation": _joined(validations), **tests}, tuple(tests)


def _joined(sets: Mapping[str, tuple[Question, ...]]) -> tuple[Question, ...]:
    return tuple(chain.from_iterable(sets.values()))
