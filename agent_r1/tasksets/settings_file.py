"""Read the settings of a task set from the TOML file of ``--data``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from agent_r1.config import read_toml
from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.hub import is_hub

S = TypeVar("S", bound=BaseModel)


def read_settings_file(cls: type[S], file: Path, *, do: str) -> S:
    """Return the settings in the TOML file ``file`` as an instance of ``cls``.

    Raise InvalidInput if the file cannot be read, or if a setting is unknown or invalid. The argument ``do`` is the end
    of the error message about a setting, such as "give hops, pages or turns".
    """
    try:
        return cls.model_validate(read_toml(file).values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InvalidInput(f"{file}, {where}", got=fault["msg"], do=do) from error


def locate_data(file: Path, data: Path) -> Path:
    """Return the location of the data that is given in a settings file.

    ``file`` is the path of the settings file. ``data`` is the path or hub name that stands in this file. A relative
    path is joined to the folder of ``file``. A hub name (``hf:..``) is returned unchanged.

    Example:
        Path("recipes/hotpot.json") for file "recipes/mix.toml" and data "hotpot.json"
    """
    return data if is_hub(data) else file.parent / data
