"""Attacks on each isolation layer, run inside the sandbox before the first use of the sandbox.

Each attack is a function. The attack was blocked if the function raises an exception or returns False. The argument
``targets`` has the path of a file outside the sandbox ("secret"), an open port outside the sandbox ("port"), and the
limits by name, such as "memory". tests/sandbox/attacks.py has more attacks.
"""

import ctypes
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any


def read_file_outside(targets: Any) -> bool:
    with open(targets["secret"], encoding="utf-8") as file:
        return bool(file.read())


def connect_to_port(targets: Any) -> bool:
    socket.create_connection(("127.0.0.1", targets["port"]), 1).close()
    return True


def signal_other_processes(targets: Any) -> bool:
    os.kill(-1, 0)  # signal 0 has no effect; the call fails only if no other process is visible
    return True


def make_denied_system_call(targets: Any) -> bool:
    return ctypes.CDLL(None).personality(ctypes.c_ulong(0xFFFFFFFF)) >= 0  # queries the personality


def become_root(targets: Any) -> bool:
    os.setuid(0)
    return True


def exceed_open_files(targets: Any) -> bool:
    files: list[int] = []
    try:
        while len(files) < 2 * targets["open_files"]:
            files.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for file in files:
            os.close(file)
    return True


def exceed_processes(targets: Any) -> bool:
    children: list[int] = []
    try:
        while len(children) < 2 * targets["processes"]:  # an ended child counts until waitpid
            child = os.fork()
            if child == 0:
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.waitpid(child, 0)
    return True


def exceed_memory(targets: Any) -> bool:
    mmap.mmap(-1, 2 * targets["memory"]).close()  # reserves address space without using memory
    return True


def exceed_memory_together(targets: Any) -> bool:
    # If the cgroup limits the memory, the kernel kills one of three processes, or this one.
    ready_read, ready_write = os.pipe()
    exit_read, exit_write = os.pipe()
    for _ in range(3):
        if os.fork() == 0:
            os.close(exit_write)
            memory = bytearray(b"x") * (2 * targets["memory"] // 5)
            os.write(ready_write, memory[:1])
            os.read(exit_read, 1)
            os._exit(0)
    os.set_blocking(ready_read, False)
    ready = 0
    while ready < 3 and os.waitpid(-1, os.WNOHANG) == (0, 0):  # no child was killed
        try:
            ready += len(os.read(ready_read, 3))
        except BlockingIOError:
            time.sleep(0.001)
    return ready == 3


ATTEMPTS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "files": (read_file_outside,),
    "network": (connect_to_port,),
    "processes": (signal_other_processes,),
    "syscalls": (make_denied_system_call,),
    "user": (become_root,),
    "limits": (exceed_open_files, exceed_processes, exceed_memory),
    "cgroup": (exceed_memory_together,),  # the last attempt, because the kernel can kill this process
}


def probe(targets: Any) -> None:
    """Try to break each isolation layer, and print one line per layer, such as "network holds" or "files broken"."""
    for layer, attempts in ATTEMPTS.items():
        result = "holds"
        for attempt in attempts:
            try:
                if attempt(targets):
                    result = "broken"
            except BaseException:  # the attempt was blocked
                continue
        print(layer, result, flush=True)
