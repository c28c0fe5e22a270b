"""A program that runs a command, and kills the command when the process that started this program ends.

The starting process holds the writing end of a pipe, and the program reads from the pipe as its standard input. When
the starting process ends, even by SIGKILL, the input ends too. The program then kills its own process group, which
contains the command. SIGUSR1 has the same effect. If the program itself is killed, the kernel kills the command.

Python's multiprocessing has helper processes that remove the shared memory of ended processes: the resource trackers.
Therefore, the program kills resource trackers last.

This file imports nothing of the package.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # linux/prctl.h

TRACKER = b"resource_tracker"
"""A part of the command line of each resource tracker, a helper process of Python's multiprocessing."""

TRACKER_SECONDS = 5.0
"""The time limit for resource trackers to remove shared memory, in seconds."""

POLL_SECONDS = 0.02


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def commands_of_group() -> dict[int, bytes]:
    """Return the command lines of all other processes in this program's process group, by process id."""
    found = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            if name.isdecimal() and int(name) != os.getpid() and os.getpgid(int(name)) == os.getpgrp():
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found[int(name)] = file.read()
        except OSError:  # the process has ended
            continue
    return {process: command for process, command in found.items() if command}  # a process that has ended has none


def end_group() -> None:
    """Kill this process group. Resource trackers are last: they remove the shared memory of the others."""
    deadline = time.monotonic() + TRACKER_SECONDS
    while (commands := commands_of_group()) and time.monotonic() < deadline:
        for process, command in commands.items():
            if TRACKER not in command:
                try:
                    os.kill(process, signal.SIGKILL)
                except OSError:  # the process has ended
                    continue
        time.sleep(POLL_SECONDS)
    os.killpg(0, signal.SIGKILL)


def end_with_input() -> None:
    sys.stdin.buffer.read()
    end_group()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIGTERM ends the command, and then this process ends
    signal.signal(signal.SIGUSR1, lambda *_: end_group())
    threading.Thread(target=end_with_input, daemon=True).start()
    subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent).wait()
    end_group()  # children of the command can still be running
