"""A cgroup around one sandbox, where this machine lets us make one: a limit on all its memory together.

Address-space limits count each process for itself, and not what lies in /tmp; a cgroup counts everything.
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
_GONE_TRIES, _GONE_SECONDS = 500, 0.002
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """The file names of one cgroup version. ``limits`` are written in this order; the first has to exist."""

    limits: tuple[str, ...]
    events: str


V1 = CgroupVersion(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "memory.oom_control")
V2 = CgroupVersion(("memory.max",), "memory.events")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One cgroup of ours. ``procs`` is the file into which a process writes its id to join."""

    path: Path
    interface: CgroupVersion

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def killed(self) -> bool:
        """Whether the kernel killed a process in it for memory."""
        try:
            found = re.search(r"^oom_kill (\d+)", (self.path / self.interface.events).read_text(), re.MULTILINE)
        except OSError:
            return False
        return found is not None and int(found.group(1)) > 0

    def discard(self) -> None:
        """Remove it where nothing ever joined it."""
        with suppress(OSError):
            self.path.rmdir()

    async def remove(self) -> None:
        """Remove it once its processes are gone; what is not gone within a second stays for the next start to clear."""
        for _ in range(_GONE_TRIES):
            try:
                self.path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(_GONE_SECONDS)
            else:
                return


def make_cgroup(memory: int) -> Cgroup | None:
    """A fresh cgroup limited to ``memory`` bytes, inside this process's own; None where none can be had."""
    for parent, interface in _parents():
        path = parent / f"agent-r1-{os.getpid()}-{next(_serial)}"
        with suppress(OSError):
            path.mkdir()
            if _limited(path, interface, memory):
                return Cgroup(path, interface)
            path.rmdir()
    return None


def clear_stale_cgroups() -> None:
    """Remove the empty cgroups that processes of ours left behind when they were killed."""
    for parent, _ in _parents():
        for path in parent.glob("agent-r1-*"):
            match = _NAME.fullmatch(path.name)
            if match and not Path("/proc", match.group(1)).exists():
                with suppress(OSError):
                    path.rmdir()


def _parents() -> Iterator[tuple[Path, CgroupVersion]]:
    """This process's own cgroups: a sandbox elsewhere would escape the limits that hold for its trainer."""
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


def _limited(path: Path, interface: CgroupVersion, memory: int) -> bool:
    """Whether the limit is in force. The kernel makes the files of a cgroup; one that is missing is not created."""
    names = [name for name in interface.limits if (path / name).exists()]
    for name in names:
        (path / name).write_text(str(memory))
    return interface.limits[0] in names
