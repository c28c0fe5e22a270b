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
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.multihop.questions import Question, read_questions
from agent_r1.tasksets.settings_file import locate_data, read_settings_file
from agent_r1.tasksets.splits import Splits, exclude, hash_order

RESERVED = ("train", "validation", "all")
"""Names that no data set of a mixture may have.

Each test data set becomes a split with the name of the data set. "train", "validation" and "all" are the names of other
splits.
"""


class Portion(BaseModel):
    """Questions of the data set ``data``: ``count`` random questions, or all questions if ``count`` is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    count: int | None = Field(default=None, ge=1)


class MixtureFile(BaseModel):
    """The content of a mixture file: for each split, a mapping from the name of a data set to a :class:`Portion`.

    A portion says where the data set is, and how many of its questions are drawn.

    Example:
        MixtureFile(test={"musique": Portion(data="musique_ans_v1.0_dev.jsonl", count=100)})
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: dict[str, Portion] = Field(default_factory=dict)
    validation: dict[str, Portion] = Field(default_factory=dict)
    test: dict[str, Portion] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The questions of a mixture.

    Attributes:
        splits: the questions by split: "train", "validation", and one split per test data set, such as "hotpotqa".
        tests: the names of the splits with test questions.
    """

    splits: Splits[Question]
    tests: tuple[str, ...]


def read_mixture(path: Path, seed: int) -> Mixture:
    """Return the questions that a mixture file selects from its data sets.

    Only the training questions depend on ``seed``. Training, validation and test share no question. A relative path in
    the file begins at the folder of the file.

    Raises InvalidInput if the file is malformed, or a data set cannot be read or has too few questions.
    """
    file = _read(path)
    draw = _Draw(path)
    tests = draw.portions("test", file.test, "split", ())
    held = _joined(tests)
    validations = draw.portions("validation", file.validation, "split", held)
    trained = draw.portions("train", file.train, str(seed), (*held, *_joined(validations)))
    # Mix the data sets. Otherwise all questions of the first data set would come before the other questions.
    train = hash_order(_joined(trained), f"mixed by {seed}")
    return Mixture({"train": train, "validation": _joined(validations), **tests}, tuple(tests))


class _Draw:
    """The data sets of a mixture file, from which questions are drawn. Each data set is read only once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = lru_cache(lambda data: read_questions(locate_data(path, Path(data))))

    def portions(
        self, split: str, portions: Mapping[str, Portion], salt: str, held: Sequence[Question]
    ) -> dict[str, tuple[Question, ...]]:
        """Draw the questions of one split, and return the questions by the name of their data set.

        ``portions`` says how many questions to draw from each data set. ``salt`` determines which questions are drawn
        and in which order. Questions in ``held`` are not drawn. Raises InvalidInput, which names the split, if a data
        set has too few questions.
        """
        return {name: self._portion(split, name, portion, salt, held) for name, portion in portions.items()}

    def _portion(
        self, split: str, name: str, portion: Portion, salt: str, held: Sequence[Question]
    ) -> tuple[Question, ...]:
        there = exclude(hash_order(self._read(portion.data), salt), held)
        wanted = len(there) if portion.count is None else portion.count
        if not there or wanted > len(there):
            got = f"{wanted} questions wanted of {portion.data}, which has {len(there)} not held for another split"
            raise InvalidInput(f"{self._path}, {split}.{name}", got=got, do="lower its count, or give more questions")
        return tuple(replace(question, id=f"{name}/{question.id}") for question in there[:wanted])


def _joined(sets: Mapping[str, tuple[Question, ...]]) -> tuple[Question, ...]:
    return tuple(chain.from_iterable(sets.values()))


def _read(path: Path) -> MixtureFile:
    do = "give [train.NAME], [validation.NAME] and [test.NAME], each with data and, if not all, count"
    file = read_settings_file(MixtureFile, path, do=do)
    if reserved := sorted({*file.train, *file.validation, *file.test} & set(RESERVED)):
        raise InvalidInput(f"{path}, {reserved[0]}", got="a data set of that name", do="give it another")
    return file
