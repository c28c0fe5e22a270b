"""The settings of ``people``, read from a TOML file that ``--data`` names."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.settings_file import read_settings_file


class Settings(BaseModel):
    """The settings of this task set, from the TOML file of ``--data``.

    The number of hops of a question is the number of facts that lead to its answer. ``hops`` changes only the training
    questions, and not the questions for validation and test.

    Example of a file:
        hops = [1, 2, 2]  # two thirds of the training questions have two hops
        pages = 1         # a search returns one page
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    hops: tuple[Literal[1, 2], ...] = Field(default=(1, 2), min_length=1)
    """The numbers of hops of the training questions, in turn: [1, 2, 2] gives two questions of 2 hops for each question
    of 1 hop."""

    pages: int = Field(default=3, ge=1)
    """The largest number of pages that a search returns."""

    turns: int = Field(default=7, ge=1)
    """The largest number of actions in an episode."""


def read_settings(path: Path | None) -> Settings:
    """Return the settings in a file; the default settings if ``path`` is None.

    Raises InvalidInput if the file cannot be read, or has an unknown or invalid setting.
    """
    if path is None:
        return Settings()
    if path.suffix != ".toml":
        do = "leave it out, because people is generated, or give a TOML file of settings"
        raise InvalidInput("data", got=path, do=do)
    return read_settings_file(Settings, path, do="give hops, pages or turns")
