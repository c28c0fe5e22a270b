"""A mixture of data sets, described by a TOML file.

The file names the data sets of the training, validation and test questions. An evaluation reports each test data set
separately. An example of a file:

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
"""Names that a data set of a mixture must not have, because every multi-hop task set can have splits of these names.

The test questions of a data set are a split with the name of the data set.
"""


class Portion(BaseModel):
    """A part of one data set: ``count`` questions, drawn at random, or all questions if ``count`` is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    count: int | None = Field(default=None, ge=1)


class MixtureFile(BaseModel):
    """The content of a mixture file: for each split, the data sets by name, and the part of each data set that is
    used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: dict[str, Portion] = Field(default_factory=dict)
    validation: dict[str, Portion] = Field(default_factory=dict)
    test: dict[str, Portion] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The questions of a mixture.

    Attributes:
        splits: the questions of each split, by name. The splits are "train", "validation", and one split per data set
            with test questions, such as "hotpotqa".
        tests: the names of the splits with test questions.
    """

    splits: Splits[Question]
    tests: tuple[str, ...]


def read_mixture(path: Path, seed: int) -> Mixture:
    """Read a mixture file, and return the questions that it selects from its data sets.

    ``seed`` determines the training questions. The test and validation questions are the same for every seed.
    Training, validation and test have no question in common, even if several data sets contain the same question. Paths
    in the file are relative to the folder of the file.

    Raises InvalidInput if the file is malformed, a data set cannot be read, or a data set has too few questions.
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
        """Draw the questions of one split. Return the drawn questions of each data set, by the name of the data set.

        Args:
            split: the name of the split, for error messages.
            portions: for each data set, by its name, the file to read and the number of questions to draw.
            salt: determines which questions are drawn, and their order.
            held: questions that are reserved for other splits. These questions are not drawn.

        Raises:
            InvalidInput: a data set has too few questions for its portion.
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
