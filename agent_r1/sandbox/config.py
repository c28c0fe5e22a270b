"""What a sandbox may be set to: its level, its limits, the packages inside. Recorded with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SandboxLevel = Literal["bubblewrap", "none"]
DEFAULT_LEVEL: SandboxLevel = "bubblewrap"

_MIB = 2**20
_SETTINGS = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Limits(BaseModel):
    """What one program may use. Sizes are bytes.

    Example:
        Limits(seconds=2, memory=2**28)
    """

    model_config = _SETTINGS

    seconds: float = Field(default=10.0, gt=0)
    """Wall-clock seconds of one call."""

    cpu_seconds: int = Field(default=120, ge=1)
    """CPU seconds of one process over its whole life."""

    memory: int = Field(default=512 * _MIB, ge=64 * _MIB)
    """Address space of each process; where cgroups can be had, memory of all processes and /tmp together too."""

    processes: int = Field(default=16, ge=1)
    """Processes and threads at the same time."""

    disk: int = Field(default=64 * _MIB, ge=_MIB)
    """Size of /tmp, the only place that can be written to, and of one file."""

    open_files: int = Field(default=64, ge=16)
    """Open files of each process."""

    output: int = Field(default=64 * 1024, ge=1)
    """Kept of each of stdout and stderr of one call; the rest is dropped and counted."""


class SandboxConfig(BaseModel):
    """Where code that a model wrote runs.

    Example:
        SandboxConfig(level="bubblewrap", limits=Limits(seconds=5))
    """

    model_config = _SETTINGS

    level: SandboxLevel = DEFAULT_LEVEL
    """bubblewrap: a container of its own without network; none: a plain process with your rights."""

    limits: Limits = Limits()
    """What one program may use."""

    packages: tuple[Path, ...] = ()
    """Folders that programs may import from, read-only, e.g. a site-packages; the standard library is always there."""
