"""T2 as the kernel sees it: strace kills a process at every call by which saving a checkpoint changes the disk."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from case import NOTHING, Case, Control, Outcome, Size
from killed_saving import KILLED_SAVING, NO_WHOLE, Saved, copy_in_place
from processes import FORK, Child

from agent_r1.store.atomic_fs import Disk

CALLS = (
    *("write", "writev", "pwrite64", "ftruncate", "fallocate", "copy_file_range", "openat", "creat"),
    *("fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "link", "linkat", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
"""What can change a file or a folder, or wait for the disk. openat is among them as it makes files."""

ATTACHING = 10.0
"""Seconds until strace follows a process."""


@dataclass(frozen=True, slots=True)
class Call:
    """The ``ordinal``-th call of a name, from 1."""

    name: str
    ordinal: int


def no_strace() -> str | None:
    """Why strace cannot follow a process here, where it cannot."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"strace cannot follow a process: {tried.stderr.strip()}"


def at_every_call(size: Size, disk: Disk | None = None) -> Outcome:
    """Save step 3 over steps 1 and 2, killed before each call in turn, or before some that are spread evenly."""
    outcome, disk = NOTHING, disk or Disk()
    with tempfile.TemporaryDirectory() as place:
        saved, log = Saved(Path(place)), Path(place) / "calls"
        saved.again()
        _traced(saved, disk, ["-y", "-o", str(log)])
        calls = _calls(log.read_text())
        most = len(calls) if size.injections >= AT_LEAST else size.injections
        for call in (calls[number * len(calls) // most] for number in range(most)):
            saved.again()
            kill = f"inject={call.name}:signal=KILL:when={call.ordinal}"
            killed = _traced(saved, disk, ["-o", os.devnull, "-e", kill])
            broken = [*saved.broken(killed), *([] if killed else ["not killed"])]
            lines = tuple(f"killed at {call.name} {call.ordinal}: {line}" for line in broken)
            outcome += Outcome(int(killed), lines, {call.name: int(killed)})
    return outcome


def _calls(log: str) -> list[Call]:
    """The calls of a log that concern the disk, in order. Others (a file that is only read, an answer by a pipe) keep
    their ordinals."""
    seen, calls = Counter[str](), list[Call]()
    for name, arguments in re.findall(r"^(?:\d+ +)?(\w+)\((.*)", log, re.MULTILINE):
        seen[name] += 1
        if (name != "openat" or "O_CREAT" in arguments) and "<pipe:" not in arguments:
            calls.append(Call(name, seen[name]))
    return calls


def _traced(saved: Saved, disk: Disk, options: Sequence[str]) -> bool:
    """Save in a process that strace follows; whether it was killed."""
    waiting, telling = FORK.Pipe(duplex=False)
    child = Child(_save, saved, disk, waiting)
    command = ["strace", "-f", "-qq", "-p", str(child.pid), "-e", f"trace={','.join(CALLS)}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        _await_tracer(child.pid, tracer)
        telling.send("go")
        return child.wait().killed


def _save(saved: Saved, disk: Disk, waiting: Connection) -> None:
    any_tracer = 0x59616D61, ctypes.c_ulong(-1)  # PR_SET_PTRACER: also where only parents may trace
    ctypes.CDLL(None).prctl(*any_tracer, 0, 0, 0)
    waiting.recv()
    saved.save(disk)


def _await_tracer(pid: int, tracer: subprocess.Popen[str]) -> None:
    until = time.monotonic() + ATTACHING
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text():
        if tracer.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"strace does not follow process {pid}: {tracer.communicate()[1]}")
        time.sleep(0.001)


class InPlaceDisk(Disk):
    """Writes into the folder of the checkpoint itself."""

    def write(self, place: Path, put: object) -> None:
        super().write(place, put)  # type: ignore[arg-type]
        copy_in_place(place)


AT_LEAST = 45
"""So many calls has any save; where so many are wanted, all are taken."""

KILLED_CALLS = Case(
    "T2b",
    "SIGKILL by strace before every system call of a save that makes, writes, syncs, renames or removes",
    KILLED_SAVING.holds,
    at_every_call,
    AT_LEAST,
    10,
    (Control("saved in place", NO_WHOLE, lambda size: at_every_call(size, InPlaceDisk()), 30),),
    hindrance=no_strace,
)
