"""The settings of ``people``, read from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.settings_file import read_settings_file


class Settings(BaseModel):
    """The settings in the TOML file of ``--data``.

    Example of a file:

        hops = [1, 2, 2]  # two thirds of the training questions have two hops
        pages = 1         # a search returns one page
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    hops: tuple[Literal[1, 2], ...] = Field(default=(1, 2), min_length=1)
    """How many facts (hops) lead to the answer of a training question. The list is repeated: with [1, 2, 2], the
    questions have 1, 2, 2, 1, 2, 2, .. hops."""

    pages: int = Field(default=3, ge=1)
    """The maximum number of pages that a search returns."""

    turns: int = Field(default=7, ge=1)
    """The maximum number of actions in an episode."""


def read_settings(path: Path | None) -> Settings:
    """Return the settings in a file; the default settings if ``path`` is None.

    Raises InvalidInput if the file cannot be read, or a setting is unknown or invalid.
    """
    if path is None:
        return Settings()
    if path.suffix != ".toml":
        do = "leave it out, because people is generated, or give a TOML file of settings"
        raise InvalidInput("data", got=path, do=do)
    return read_settings_file(Settings, path, do="give hops, pages or turns")
