"""A cgroup around one sandbox, if this machine permits it: a limit on the memory of all its processes together.

Address-space limits apply to each process separately and do not cover files in /tmp; a cgroup covers everything.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")

_NAME = re.compile(r"agent-r1-(\d+)-\d+")
_REMOVE_TRIES, _REMOVE_SECONDS = 500, 0.002
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """The file names of a cgroup version. The limits are written in this order; the first file must exist."""

    limits: tuple[str, ...]
    events: str


V1 = CgroupVersion(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control")
V2 = CgroupVersion(("memory.max",), "memory.events")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup. A process joins it by writing its id to the file ``procs``."""

    path: Path
    version: CgroupVersion

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process in it because of its memory limit."""
        try:
            found = re.search(r"^oom_kill (\d+)", (self.path / self.version.events).read_text(), re.MULTILINE)
        except OSError:
            return False
        return found is not None and int(found.group(1)) > 0

    def discard(self) -> None:
        """Remove it if no process ever joined it."""
        with suppress(OSError):
            self.path.rmdir()

    async def remove(self) -> None:
        """Remove it once its processes have ended. If that takes over a second, it is left to the next start."""
        for _ in range(_REMOVE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(_REMOVE_SECONDS)
            else:
                return


def make_cgroup(memory: int) -> Cgroup | None:
    """Return a new cgroup with a limit in bytes, inside the cgroup of this process; None if that is not permitted."""
    for parent, version in _parents():
        path = parent / f"agent-r1-{os.getpid()}-{next(_serial)}"
        with suppress(OSError):
            path.mkdir()
            if _set_limit(path, version, memory):
                return Cgroup(path, version)
            path.rmdir()
    return None


def clear_stale_cgroups() -> None:
    """Remove the empty cgroups of trainer processes that were killed."""
    for parent, _ in _parents():
        for path in parent.glob("agent-r1-*"):
            match = _NAME.fullmatch(path.name)
            if match and not Path("/proc", match.group(1)).exists():
                with suppress(OSError):
                    path.rmdir()


def _parents() -> Iterator[tuple[Path, CgroupVersion]]:
    """Yield the cgroups of this process. A sandbox elsewhere would escape the limits of its trainer."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield ROOT / path.lstrip("/"), V2
        elif controllers == "memory":
            yield ROOT / "memory" / path.lstrip("/"), V1


def _set_limit(path: Path, version: CgroupVersion, memory: int) -> bool:
    """Return whether the limit could be set. The kernel creates the files of a cgroup, so none is created here."""
    names = [name for name in version.limits if (path / name).exists()]
    for name in names:
        (path / name).write_text(str(memory))
    return version.limits[0] in names
