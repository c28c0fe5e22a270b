"""Machines on one machine: each has a network namespace and a file system of its own for temporary files and runs.

To Ray, gloo and HTTP they are different machines: their addresses differ, the loopback of one is not that of another,
and no file below ``/tmp``, ``/dev/shm`` or the folder ``work`` of one is seen by another. They share the processor and
the installed programs. They need root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0."
PRIVATE = ("/tmp", "/dev/shm")
KILL_SECONDS = 30.0


def missing() -> str | None:
    """Return why machines cannot be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs root on Linux"
    if any(shutil.which(program) is None for program in ("ip", "unshare", "mount")):
        return "it needs ip, unshare and mount"
    probe = subprocess.run(["ip", "netns", "add", "agent-r1-probe"], capture_output=True, text=True, encoding="utf-8")
    subprocess.run(["ip", "netns", "delete", "agent-r1-probe"], capture_output=True)
    return None if probe.returncode == 0 else f"network namespaces cannot be made: {probe.stderr.strip()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, encoding="utf-8")


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster. Its folder ``work`` is ``root / "work"``, which all its commands see under ``work``."""

    name: str
    address: str
    root: Path
    work: Path

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on the machine, with its output in ``log``. It is in a process group of its own."""
        mounts = [f"mount --bind {self.root}{folder} {folder}" for folder in PRIVATE]
        mounts.append(f"mount --bind {self.root}/work {self.work}")
        script = f'{" && ".join(mounts)} && cd {self.work} && exec "$@"'
        words = ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", script, "sh", *command]
        with log.open("ab") as output:
            return subprocess.Popen(words, env=dict(environment), stdout=output, stderr=output, process_group=0)

    @property
    def processes(self) -> set[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True, encoding="utf-8"
        )
        return set(map(int, listed.stdout.split()))

    def kill(self) -> None:
        """Kill all processes of the machine, as a loss of power does."""
        end = time.monotonic() + KILL_SECONDS
        while pids := self.processes:
            assert time.monotonic() < end, f"processes of {self.name} do not end: {pids}"
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def freeze(self) -> None:
        """Stop all processes of the machine until :meth:`thaw`."""
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def cut(self) -> None:
        """Cut the machine's link to all others."""
        ip("netns", "exec", SWITCH, "ip", "link", "set", f"to-{self.name}", "down")

    def mend(self) -> None:
        ip("netns", "exec", SWITCH, "ip", "link", "set", f"to-{self.name}", "up")

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that the machine has sent over its link."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        read = ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", f"mount -t sysfs s /sys; cat {path}"]
        return int(subprocess.run(read, check=True, capture_output=True, text=True, encoding="utf-8").stdout)


SWITCH = "agent-r1-switch"


class Machines:
    """``count`` machines behind a switch, whose files are in ``folder``. A context manager that leaves nothing."""

    def __init__(self, count: int, folder: Path) -> None:
        self._folder, self._count = folder, count
        self.machines: list[Machine] = []

    def __enter__(self) -> list[Machine]:
        try:
            ip("netns", "add", SWITCH)
            ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
            ip("-n", SWITCH, "link", "set", "bridge", "up")
            for number in range(1, self._count + 1):
                self._add(f"agent-r1-{number}", f"{NETWORK}{number}")
        except BaseException:
            self.__exit__()
            raise
        return self.machines

    def _add(self, name: str, address: str) -> None:
        work, root = self._folder / "work", self._folder / name
        work.mkdir(parents=True, exist_ok=True)
        for folder in (*PRIVATE, "/work"):
            (root / folder.lstrip("/")).mkdir(parents=True)
        ip("netns", "add", name)
        self.machines.append(Machine(name, address, root, work))
        ip("link", "add", f"to-{name}", "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", SWITCH, "link", "set", f"to-{name}", "master", "bridge", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")

    def __exit__(self, *exception: object) -> None:
        for machine in self.machines:
            machine.kill()
            ip("netns", "delete", machine.name)
        subprocess.run(["ip", "netns", "delete", SWITCH], capture_output=True)
