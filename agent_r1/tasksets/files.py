"""Questions in files and on the Hugging Face hub: read their rows, divide them into splits, read a settings file.

The validation questions select the best checkpoint. An evaluation reports results on the test questions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.config import read_toml
from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, read_records
from agent_r1.core.task import Task

PREFIX = "hf:"

_NAME = re.compile(r"hf:(?P<name>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")
_FORM = "write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG@SPLIT, such as hf:hotpotqa/hotpot_qa:distractor@validation"


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a data set on the hub, or of a folder that ``datasets`` can load.

    ``config`` is None for the default configuration, and ``split`` is None for all splits.
    """

    name: str
    config: str | None
    split: str | None

    def __str__(self) -> str:
        config, split = f":{self.config}" if self.config else "", f"@{self.split}" if self.split else ""
        return f"{PREFIX}{self.name}{config}{split}"


def is_hub(source: Path) -> bool:
    """Return whether ``source`` names a data set on the hub (``hf:..``) and not a file."""
    return str(source).startswith(PREFIX)


def hub_name(source: Path) -> HubName:
    """Parse the name of a data set on the hub. Raises InvalidInput if the form of the name is wrong.

    Example:
        hub_name(Path("hf:openai/gsm8k:main@test")) == HubName("openai/gsm8k", "main", "test")
    """
    match = _NAME.fullmatch(str(source))
    if match is None:
        raise InvalidInput("--data", got=str(source), do=_FORM)
    return HubName(match["name"], match["config"], match["split"])


def read_rows(source: Path) -> Iterator[JsonRecord]:
    """Yield the rows of a JSON or JSONL file, or of one split on the hub, numbered from 1.

    The name of a data set with several splits must end with ``@SPLIT``. Raises InvalidInput if ``source`` cannot be
    read.
    """
    if not is_hub(source):
        yield from read_records(source)
        return
    name = hub_name(source)
    splits = _load_from_hub(name)
    wanted = name.split or (next(iter(splits)) if len(splits) == 1 else None)
    if wanted is None or wanted not in splits:
        do = f"end it with one of {', '.join(f'@{split}' for split in splits)}"
        raise InvalidInput("--data", got=str(name), do=do)
    for number, values in enumerate(splits[wanted], start=1):
        yield JsonRecord(source, number, values)


def _load_from_hub(name: HubName) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError as error:
        do = "pip install 'agent-r1[datasets]', or give a file"
        raise InvalidInput("--data", got=f"{name} without the datasets package", do=do) from error
    try:
        return dict(datasets.load_dataset(name.name, name.config))
    except Exception as error:
        # An unknown name, an unknown configuration, no connection and a broken file raise different types of errors.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InvalidInput("--data", got=str(name), do=f"name a data set that can be loaded ({reason})") from error


SPLITS = ("train", "validation", "test")
WHOLE = "all"
"""The name of an additional split, which contains all questions. It exists only if :func:`divide` made the others."""

_MOST = {"test": 1000, "validation": 128}

HELD_BACK = ("validation", "dev", "test")
"""For benchmarks whose split "test" has no public answers: the test questions come from the first of these splits."""

GIVEN_OUT = ("test", "validation", "dev")
"""For benchmarks whose split "test" has public answers: the test questions come from the first of these splits."""


class BenchmarkQuestion(Protocol):
    @property
    def text(self) -> str: ...

    def task(self, split: str) -> Task: ...


Question = TypeVar("Question", bound=BenchmarkQuestion)
Splits = Mapping[str, tuple[Question, ...]]
Read = Callable[[Path], tuple[Question, ...]]
"""A function that reads the questions of a file or of a split on the hub. A bad row raises InvalidInput."""


def read_splits(data: Path, seed: int, read: Read[Question], tested: Sequence[str] = HELD_BACK) -> Splits[Question]:
    """Return the questions of each split in ``data``: a folder, a file, or the name of a data set on the hub.

    A folder has one file per split, such as ``train.jsonl``. If ``read`` accepts folders, a split can also be a folder.
    A single file, or a single split on the hub, is divided by :func:`divide`; all its questions are also in the split
    ``WHOLE``. Of a data set with several splits on the hub, the test questions are those of the first split in
    ``tested`` that exists. The other questions come from its split "train", without the test questions: a tenth, but at
    most 128, for validation, and the rest for training. ``seed`` determines the order of the training questions.

    Raises:
        InvalidInput: a row cannot be read, a folder has no questions or has a question in two splits, a file has too
            few questions, or a data set on the hub has no training or no test questions.
    """
    if is_hub(data):
        splits = _hub_splits(data, read, tested)
    else:
        splits = _folder_splits(data, read) if data.is_dir() else _divided(read(data), data)
    return {**splits, "train": hash_order(splits["train"], str(seed))}


def _divided(questions: Sequence[Question], source: Path) -> Splits[Question]:
    return {**divide(questions, source), WHOLE: hash_order(questions, "split")}


def divide(questions: Sequence[Question], source: Path) -> Splits[Question]:
    """Divide the questions of one file into test, validation and training.

    Test gets a fifth of the distinct questions, at least 1 and at most 1000. Validation gets a tenth, at least 1 and at
    most 128. Raises InvalidInput, which names the file ``source``, if there are fewer than three distinct questions.
    """
    # A hash of the text decides the split: the test questions depend on no seed, and equal questions are in one split.
    ordered = hash_order(questions, "split")
    texts = list(dict.fromkeys(map(_key, ordered)))
    if len(texts) < len(SPLITS):
        got = f"{len(texts)} different questions"
        raise InvalidInput(str(source), got=got, do="give at least 3, one for each split")
    tests = min(_MOST["test"], max(len(texts) // 5, 1))
    validations = min(_MOST["validation"], max(len(texts) // 10, 1))
    split_of = dict.fromkeys(texts, "train")
    split_of |= dict.fromkeys(texts[:tests], "test")
    split_of |= dict.fromkeys(texts[tests : tests + validations], "validation")
    return {split: tuple(question for question in ordered if split_of[_key(question)] == split) for split in SPLITS}


def _hub_splits(data: Path, read: Read[Question], tested: Sequence[str]) -> Splits[Question]:
    name = hub_name(data)
    there = tuple(_load_from_hub(name))
    if name.split is not None or len(there) == 1:
        return _divided(read(data), data)
    reported = next((split for split in tested if split in there), None)
    if reported is None or "train" not in there:
        do = f"choose one of its splits: {', '.join(f'{data}@{split}' for split in there)}"
        raise InvalidInput("--data", got=f"{data}, which has no train and {tested[0]}", do=do)
    tests, rest = (hash_order(read(Path(str(replace(name, split=split)))), "split") for split in (reported, "train"))
    rest = exclude(rest, tests)
    validations = rest[: min(_MOST["validation"], len(rest) // 10)]
    return {"train": exclude(rest, validations), "validation": validations, "test": tests}


def _folder_splits(folder: Path, read: Read[Question]) -> Splits[Question]:
    splits: dict[str, tuple[Question, ...]] = {}
    for split in SPLITS:
        files = [path for name in (f"{split}.json", f"{split}.jsonl", split) if (path := folder / name).exists()]
        if len(files) > 1:
            raise InvalidInput(str(folder), got=f"{files[0].name} and {files[1].name}", do="keep one of them")
        splits[split] = read(files[0]) if files else ()
    if not any(splits.values()):
        raise InvalidInput(str(folder), got="no question files", do="name them train.json, validation.json, test.json")
    split_of: dict[str, str] = {}
    for split, questions in splits.items():
        for question in questions:
            if split_of.setdefault(_key(question), split) != split:
                both = f"{question.text!r} in {split_of[_key(question)]} and {split}"
                raise InvalidInput(str(folder), got=both, do="keep every question in one split")
    return splits


def whole_split(splits: Splits[Question]) -> str | None:
    """Return ``WHOLE`` if there is a split with this name; else None."""
    return WHOLE if WHOLE in splits else None


def all_questions(splits: Splits[Question]) -> tuple[Question, ...]:
    """Return the questions of all splits except ``WHOLE``."""
    return tuple(chain.from_iterable(questions for split, questions in splits.items() if split != WHOLE))


def tasks_function(splits: Splits[Question], data: Path) -> Callable[[str], Sequence[Task]]:
    """Return a function that returns the tasks of a split. The function raises InvalidInput if the split is empty."""
    return nonempty_splits({name: tuple(one.task(name) for one in some) for name, some in splits.items()}, data)


def nonempty_splits(tasks: Mapping[str, Sequence[Task]], data: Path) -> Callable[[str], Sequence[Task]]:
    """Return a function that returns ``tasks[split]``. The function raises InvalidInput if the split is empty."""

    def of(split: str) -> Sequence[Task]:
        if not tasks.get(split):
            there = ", ".join(name for name, some in tasks.items() if some)
            raise InvalidInput(f"split of {data}", got=repr(split), do=f"use one that it has: {there}")
        return tasks[split]

    return of


def exclude(questions: Sequence[Question], others: Sequence[BenchmarkQuestion]) -> tuple[Question, ...]:
    """Return the questions that are not in ``others``, compared by their texts."""
    asked = set(map(_key, others))
    return tuple(question for question in questions if _key(question) not in asked)


def hash_order(questions: Sequence[Question], salt: str) -> tuple[Question, ...]:
    """Return the questions in an order that looks random but is the same on every machine: sorted by a hash."""
    return tuple(sorted(questions, key=lambda question: hashlib.sha256(f"{salt}|{_key(question)}".encode()).digest()))


def _key(question: BenchmarkQuestion) -> str:
    return normalized_text(question.text)


def normalized_text(text: str) -> str:
    """Return the text in lower case and with single spaces. Questions with equal normalized texts are equal."""
    return " ".join(text.casefold().split())


class DataSettings(BaseModel):
    """The settings of a task set in a TOML file that names the file of the data."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: Path
    """The file, folder or data set on the hub. A relative path begins at the folder of the settings file."""


S = TypeVar("S", bound=BaseModel)
D = TypeVar("D", bound=DataSettings)


def read_settings(cls: type[D], data: Path) -> D:
    """Return the settings in the TOML file ``data``; if ``data`` is not a TOML file, it is the setting ``data``."""
    if data.suffix != ".toml":
        return cls(data=data)
    settings = read_settings_file(cls, data)
    return settings.model_copy(update={"data": locate_data(data, settings.data)})


def read_settings_file(cls: type[S], file: Path) -> S:
    """Return the settings in a TOML file as an instance of ``cls``.

    Raises InvalidInput if the file cannot be read, or if a setting is unknown or invalid.
    """
    try:
        return cls.model_validate(read_toml(file).values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InvalidInput(f"{file}, {where}", got=fault["msg"], do=f"give {', '.join(cls.model_fields)}") from error


def locate_data(file: Path, data: Path) -> Path:
    """Return the location of ``data``, which is given in the settings file ``file``.

    A relative path begins at the folder of ``file``. A hub name (``hf:..``) is returned unchanged.
    """
    return data if is_hub(data) else file.parent / data
