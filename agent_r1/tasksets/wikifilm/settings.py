"""The settings of ``wikifilm``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.settings_file import locate_data, read_settings_file

Kind = Literal["1-hop", "2-hop", "comparison", "bridge-comparison"]

KINDS: tuple[Kind, ...] = ("1-hop", "2-hop", "comparison", "bridge-comparison")
"""The kinds of questions. The id of a question begins with its kind.

- 1-hop and 2-hop: one fact, or a chain of two facts, leads to the answer.
- comparison: the question compares two films.
- bridge-comparison: the question compares two films by facts about their directors.
"""


class Settings(BaseModel):
    """The settings in a file. The questions of validation and test depend only on the setting ``data``.

    Example of a file:

        data = "pages.jsonl"
        kinds = ["1-hop"]
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: Path
    """The file, folder or data set with the pages, from which the questions are built. A relative path begins at
    the folder of the settings file."""

    kinds: tuple[Kind, ...] = Field(default=KINDS, min_length=1)
    """The kinds of questions in the training split."""

    pages: int = Field(default=3, ge=1)
    """The maximum number of pages that a search returns."""

    turns: int = Field(default=7, ge=1)
    """The maximum number of actions in an episode: the searches and the answer. A question of the kind
    "bridge-comparison" (see ``KINDS``) needs four searches."""


def read_settings(data: Path | None) -> Settings:
    """Return the settings in ``data`` if ``data`` is a TOML file; else ``Settings(data=data)``.

    If ``data`` is not a TOML file, ``data`` contains the pages, and the other settings have their default values.

    Raises InvalidInput if ``data`` is None, the TOML file cannot be read, or a setting is unknown or invalid.
    """
    if data is None:
        raise InvalidInput("--data for wikifilm", got="nothing", do="give a file of Wikipedia's pages about films")
    if data.suffix != ".toml":
        return Settings(data=data)
    settings = read_settings_file(Settings, data, do="give data, kinds, pages or turns")
    return settings.model_copy(update={"data": locate_data(data, settings.data)})
