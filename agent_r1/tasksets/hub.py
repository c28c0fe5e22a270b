"""Read rows from files and from data sets on the Hugging Face hub. Only the hub needs the package ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, read_records

PREFIX = "hf:"

_NAME = re.compile(r"hf:(?P<name>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<split>[^:@]+))?")

_FORM = "write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG@SPLIT, such as hf:hotpotqa/hotpot_qa:distractor@validation"


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a data set on the hub, or of a folder that ``datasets`` can load.

    Attributes:
        name: the name of the data set, or the path of the folder.
        config: the configuration; None for the default configuration.
        split: one split; None for all splits.
    """

    name: str
    config: str | None
    split: str | None

    def at(self, split: str) -> HubName:
        return HubName(self.name, self.config, split)

    def __str__(self) -> str:
        return (
            PREFIX + self.name + (f":{self.config}" if self.config else "") + (f"@{self.split}" if self.split else "")
        )


def is_hub(source: Path) -> bool:
    """Return whether ``source`` names a data set on the hub (``hf:..``) and not a file."""
    return str(source).startswith(PREFIX)


def read_rows_or_hub(source: Path) -> Iterator[JsonRecord]:
    """Return the rows of a JSON or JSONL file, or of one split on the hub (see :func:`hub_rows`).

    Raises InvalidInput if ``source`` cannot be read.
    """
    return hub_rows(source) if is_hub(source) else read_records(source)


def hub_name(source: Path) -> HubName:
    """Parse the name of a data set on the hub. Raises InvalidInput if the form of the name is wrong.

    Example:
        hub_name(Path("hf:openai/gsm8k:main@test")) == HubName("openai/gsm8k", "main", "test")
    """
    match = _NAME.fullmatch(str(source))
    if match is None:
        raise InvalidInput("--data", got=str(source), do=_FORM)
    return HubName(match["name"], match["config"], match["split"])


def hub_splits(name: HubName) -> tuple[str, ...]:
    """Return the names of the splits of a data set, such as ("train", "validation").

    Raises InvalidInput if the data set cannot be loaded.
    """
    return tuple(_loaded(name))


def hub_rows(source: Path) -> Iterator[JsonRecord]:
    """Yield the rows of one split on the hub, numbered from 1.

    ``source`` has the form ``hf:NAME``, ``hf:NAME:CONFIG`` or ``hf:NAME:CONFIG@SPLIT``. A data set with several splits
    needs ``@SPLIT``. Raises InvalidInput if the data set cannot be loaded or the split is missing.
    """
    name = hub_name(source)
    splits = _loaded(name)
    wanted = name.split or (next(iter(splits)) if len(splits) == 1 else None)
    if wanted is None or wanted not in splits:
        raise InvalidInput(
            "--data", got=str(name), do=f"end it with one of {', '.join(f'@{split}' for split in splits)}"
        )
    for number, values in enumerate(splits[wanted], start=1):
        yield JsonRecord(source, number, values)


def _loaded(name: HubName) -> Mapping[str, Any]:
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
