"""The settings of the task set ``code-repair``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.settings_file import locate_data, read_settings_file


class Settings(BaseModel):
    """The settings of the task set ``code-repair``, as in a TOML file.

    Example of a file:

        data = "mbpp.jsonl"
        proposals = 6
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: Path
    """The file or data set with the functions and their tests, in the format of MBPP. A relative path begins at the
    folder of the settings file."""

    lines: int = Field(default=8, ge=2)
    """The maximum number of lines of a function. Longer functions are left out."""

    bugs: int = Field(default=3, ge=1)
    """The maximum number of tasks that are made from one function of the training split. Each task has one bug. In the
    other splits, at most one task is made from each function."""

    proposals: int = Field(default=0, ge=0, le=99)
    """The maximum number of proposed lines, of which the agent chooses one. 0: the agent writes the line itself."""

    turns: int = Field(default=4, ge=2)
    """The maximum number of actions in an episode."""

    shuffle_feedback: bool = False
    """Whether the agent's test tool ignores the agent's edit, and returns the result of a random edit of a random
    function instead. This is a control experiment."""


def read_settings(data: Path | None) -> Settings:
    """Return the settings of the task set ``code-repair``.

    If the path ``data`` ends in ".toml", ``data`` is a file of settings, and the settings are read from this file.
    Otherwise ``data`` is the file or data set with the functions to repair. The result is then ``Settings(data=data)``,
    with the default values of all other settings.

    Raises InvalidInput if ``data`` is None, the TOML file cannot be read, or a setting is unknown or invalid.
    """
    if data is None:
        raise InvalidInput("--data for code-repair", got="nothing", do="give a file of functions with tests (MBPP)")
    if data.suffix != ".toml":
        return Settings(data=data)
    do = "give data, lines, bugs, proposals, turns or shuffle_feedback"
    settings = read_settings_file(Settings, data, do=do)
    return settings.model_copy(update={"data": locate_data(data, settings.data)})
