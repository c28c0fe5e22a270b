"""The configuration of a sandbox: isolation level, limits and packages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SandboxLevel = Literal["bubblewrap", "none"]
DEFAULT_LEVEL: SandboxLevel = "bubblewrap"

_MIB = 2**20
_SETTINGS = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Limits(BaseModel):
    """The limits of one program. Sizes are in bytes."""

    model_config = _SETTINGS

    seconds: float = Field(default=10.0, gt=0)
    """The time limit of one run of code (a program or a cell), in wall-clock seconds."""

    cpu_seconds: int = Field(default=120, ge=1)
    """The largest CPU time of one process over its whole life, in seconds."""

    memory: int = Field(default=512 * _MIB, ge=64 * _MIB)
    """The largest address space of each process, in bytes.

    With cgroups, the same number also limits a total: the memory of all processes plus the size of the files in /tmp.
    """

    processes: int = Field(default=16, ge=1)
    """The largest number of processes and threads at the same time."""

    disk: int = Field(default=64 * _MIB, ge=_MIB)
    """The size of /tmp, the only writable folder, in bytes. Also the largest size of one file."""

    open_files: int = Field(default=64, ge=16)
    """The largest number of open files of each process."""

    output: int = Field(default=64 * 1024, ge=1)
    """The number of bytes of stdout, and of stderr, that are kept for each run of code. Later bytes are dropped."""


class SandboxConfig(BaseModel):
    """The configuration of a sandbox."""

    model_config = _SETTINGS

    level: SandboxLevel = DEFAULT_LEVEL
    """The isolation of programs. With "bubblewrap", programs run in a container without network. With "none", programs
    run with the rights of your user."""

    limits: Limits = Limits()
    """The limits of one program."""

    packages: tuple[Path, ...] = ()
    """Folders from which programs can import, such as a site-packages folder. Programs cannot change these folders."""
