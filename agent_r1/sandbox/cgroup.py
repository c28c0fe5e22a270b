"""A cgroup around one sandbox, if this machine permits cgroups.

The cgroup limits the memory of all processes in the sandbox together with the files in /tmp.
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
    """The names of the files that control a cgroup. They differ between the cgroup versions 1 and 2.

    Attributes:
        limits: the files to which the memory limit is written, in this order. The first file must exist.
        events: the file that counts the processes killed because of the memory limit.
    """

    limits: tuple[str, ...]
    events: str


V1 = CgroupVersion(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control")
V2 = CgroupVersion(("memory.max",), "memory.events")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup (control group): a group of processes whose total memory the kernel limits.

    A process joins the cgroup by writing its id to the file ``procs``.
    """

    path: Path
    version: CgroupVersion

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel killed a process because of the memory limit."""
        try:
            found = re.search(r"^oom_kill (\d+)", (self.path / self.version.events).read_text(), re.MULTILINE)
        except OSError:
            return False
        return found is not None and int(found.group(1)) > 0

    def discard(self) -> None:
        """Remove the cgroup if no process has joined it."""
        with suppress(OSError):
            self.path.rmdir()

    async def remove(self) -> None:
        """Remove the cgroup after its processes have ended.

        If processes still run after about a second, leave the cgroup to :func:`clear_stale_cgroups` of a later process.
        """
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
    """Return a new cgroup with a memory limit in bytes, or None if this machine does not permit cgroups."""
    for parent, version in _parents():
        path = parent / f"agent-r1-{os.getpid()}-{next(_serial)}"
        with suppress(OSError):
            path.mkdir()
            if _set_limit(path, version, memory):
                return Cgroup(path, version)
            path.rmdir()
    return None


def clear_stale_cgroups() -> None:
    """Remove the empty cgroups that earlier processes made and left behind."""
    for parent, _ in _parents():
        for path in parent.glob("agent-r1-*"):
            match = _NAME.fullmatch(path.name)
            if match and not Path("/proc", match.group(1)).exists():
                with suppress(OSError):
                    path.rmdir()


def _parents() -> Iterator[tuple[Path, CgroupVersion]]:
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
    """Write the memory limit, in bytes, to each file of ``version.limits`` that exists in the folder of the cgroup.

    Return whether the first file of ``version.limits`` exists.
    """
    # Some kernels create only some of the files.
    names = [name for name in version.limits if (path / name).exists()]
    for name in names:
        (path / name).write_text(str(memory))
    return version.limits[0] in names
