"""The configuration of a sandbox: isolation level, limits and packages. It is recorded with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SandboxLevel = Literal["bubblewrap", "none"]
DEFAULT_LEVEL: SandboxLevel = "bubblewrap"

_MIB = 2**20
_SETTINGS = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Limits(BaseModel):
    """The limits of one program. Sizes are in bytes.

    Example:
        Limits(seconds=2, memory=2**28)
    """

    model_config = _SETTINGS

    seconds: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one call."""

    cpu_seconds: int = Field(default=120, ge=1)
    """CPU seconds of one process over its whole life."""

    memory: int = Field(default=512 * _MIB, ge=64 * _MIB)
    """Address space of each process; if cgroups are available, also the memory of all processes and /tmp together."""

    processes: int = Field(default=16, ge=1)
    """The number of concurrent processes and threads."""

    disk: int = Field(default=64 * _MIB, ge=_MIB)
    """The size of /tmp, the only writable folder, and of one file."""

    open_files: int = Field(default=64, ge=16)
    """Open files of each process."""

    output: int = Field(default=64 * 1024, ge=1)
    """The part that is kept of each of stdout and stderr of one call; the rest is dropped and counted."""


class SandboxConfig(BaseModel):
    """The configuration of a sandbox.

    Example:
        SandboxConfig(level="bubblewrap", limits=Limits(seconds=5))
    """

    model_config = _SETTINGS

    level: SandboxLevel = DEFAULT_LEVEL
    """bubblewrap: a container without network; none: a plain process with your rights."""

    limits: Limits = Limits()
    """The limits of one program."""

    packages: tuple[Path, ...] = ()
    """Folders that programs may import from, read-only, e.g. a site-packages folder, besides the standard library."""
