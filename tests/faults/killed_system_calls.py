"""T2 at the level of the kernel: strace kills a process at every system call with which a save changes the disk."""

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

from fault_case import NOTHING, Case, Control, Outcome, Size
from killed_saving import KILLED_SAVING, NO_INTACT, SavedRun, copy_in_place
from processes import FORK, Child

from agent_r1.core.files import Disk

CALLS = (
    *("write", "writev", "pwrite64", "ftruncate", "fallocate", "copy_file_range", "openat", "creat"),
    *("fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "link", "linkat", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)
"""System calls that can change a file or a folder, or wait for the disk. openat can create files."""

ATTACH_SECONDS = 10.0
"""Time limit for strace to attach."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call: the ``ordinal``-th of its name, from 1."""

    name: str
    ordinal: int


def no_strace() -> str | None:
    """Return why strace cannot trace a process here, None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, encoding="utf-8")
    return None if tried.returncode == 0 else f"strace cannot trace a process: {tried.stderr.strip()}"


def kill_at_every_call(size: Size, disk: Disk | None = None) -> Outcome:
    """Save step 3 after steps 1 and 2, killed before each call in turn, or before some that are spread evenly."""
    outcome, disk = NOTHING, disk or Disk()
    with tempfile.TemporaryDirectory() as place:
        saved, log = SavedRun(Path(place)), Path(place) / "calls"
        saved.reset()
        _traced(saved, disk, ["-y", "-o", str(log)])
        calls = _calls(log.read_text("utf-8"))
        most = len(calls) if size.injections >= MIN_CALLS else size.injections
        for call in (calls[number * len(calls) // most] for number in range(most)):
            saved.reset()
            kill = f"inject={call.name}:signal=KILL:when={call.ordinal}"
            killed = _traced(saved, disk, ["-o", os.devnull, "-e", kill])
            broken = [*saved.violations(killed), *([] if killed else ["not killed"])]
            lines = tuple(f"killed at {call.name} {call.ordinal}: {line}" for line in broken)
            outcome += Outcome(int(killed), lines, {call.name: int(killed)})
    return outcome


def _calls(log: str) -> list[Call]:
    """Return the calls of a log that change the disk, in order.

    Others (a file that is only read, an answer through a pipe) count for the ordinals.
    """
    counts, calls = Counter[str](), list[Call]()
    for name, arguments in re.findall(r"^(?:\d+ +)?(\w+)\((.*)", log, re.MULTILINE):
        counts[name] += 1
        if (name != "openat" or "O_CREAT" in arguments) and "<pipe:" not in arguments:
            calls.append(Call(name, counts[name]))
    return calls


def _traced(saved: SavedRun, disk: Disk, options: Sequence[str]) -> bool:
    """Save in a process that strace traces; return whether it was killed."""
    waiting, telling = FORK.Pipe(duplex=False)
    child = Child(_save, saved, disk, waiting)
    command = ["strace", "-f", "-qq", "-p", str(child.pid), "-e", f"trace={','.join(CALLS)}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as tracer:
        _await_tracer(child.pid, tracer)
        telling.send("go")
        return child.wait().killed


def _save(saved: SavedRun, disk: Disk, waiting: Connection) -> None:
    any_tracer = 0x59616D61, ctypes.c_ulong(-1)  # PR_SET_PTRACER: some kernels allow only parents to trace
    ctypes.CDLL(None).prctl(*any_tracer, 0, 0, 0)
    waiting.recv()
    saved.save(disk)


def _await_tracer(pid: int, tracer: subprocess.Popen[str]) -> None:
    until = time.monotonic() + ATTACH_SECONDS
    while "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text("utf-8"):
        if tracer.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"strace does not trace process {pid}: {tracer.communicate()[1]}")
        time.sleep(0.001)


class InPlaceDisk(Disk):
    """Writes into the folder of the checkpoint itself."""

    def write(self, place: Path, put: object) -> None:
        super().write(place, put)  # type: ignore[arg-type]
        copy_in_place(place)


MIN_CALLS = 45
"""Every save has at least this many calls; if as many injections are required, all calls are used."""

KILLED_CALLS = Case(
    "T2b",
    "SIGKILL by strace before every system call of a save that creates, writes, syncs, renames or removes",
    KILLED_SAVING.holds,
    kill_at_every_call,
    MIN_CALLS,
    10,
    (Control("saved in place", NO_INTACT, lambda size: kill_at_every_call(size, InPlaceDisk()), 30),),
    hindrance=no_strace,
)
