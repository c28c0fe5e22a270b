"""The other side of :mod:`agent_r1.envs.adapters.processes`: a process that forks others, and what they do.

    python -m agent_r1.envs.adapters.fork_server FD MODULE

imports MODULE once and then obeys its control socket: ``{"fork": true}`` with a socket attached forks a process that
serves an object over that socket, ``{"kill": pid}`` ends one. Where the control socket closes, because whoever
started this ended in whatever way, all are killed. One thread, so that forking is safe.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from operator import attrgetter, methodcaller
from typing import Any

LENGTH = struct.Struct(">I")
"""Every message is JSON in UTF-8 behind its length in bytes."""


def main(descriptor: int, module: str) -> None:
    control = socket.socket(fileno=descriptor)
    failure = _imported(module)
    children: set[int] = set()
    try:
        while (order := _order(control)) is not None:
            request, given = order
            _reap(children)
            if "kill" in request:
                _end(request["kill"], children)
                reply: dict[str, Any] = {}
            elif failure is not None:
                reply = {"failed": failure}
            else:
                reply = {"pid": _fork(control, given, children)}
            for number in given:
                os.close(number)
            _send(control, reply)
    finally:
        for pid in tuple(children):
            _end(pid, children)


def _imported(module: str) -> str | None:
    """Why the module cannot be imported; None where it was."""
    try:
        importlib.import_module(module)
    except BaseException as error:
        return _told(error)
    return None


def _order(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next order and the descriptors that came with it; None where there will be none."""
    message, given, _, _ = socket.recv_fds(control, 4096, 1)
    return (json.loads(message), given) if message else None


def _fork(control: socket.socket, given: list[int], children: set[int]) -> int:
    pid = os.fork()
    if pid:
        children.add(pid)
        return pid
    try:
        os.setsid()  # a group of its own, so that what it starts is killed with it
        control.close()
        _serve(socket.socket(fileno=given[0]))
    finally:
        os._exit(0)


def _end(pid: int, children: set[int]) -> None:
    """Kill a process that was forked here, with what it started. It is not reaped before, so the number is its own."""
    if pid in children:
        children.discard(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
        os.waitpid(pid, 0)


def _reap(children: set[int]) -> None:
    """End those that ended by themselves, and what they started."""
    while children and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        _end(ended.si_pid, children)


def _serve(connection: socket.socket) -> None:
    """Make the object that the first request names; then call what is asked of it, until nobody asks any more."""
    served: Any = None
    while (request := _receive(connection)) is not None:
        try:
            if served is None:
                served, value = import_attribute(request["make"])(**request["keywords"]), None
            else:
                value = methodcaller(request["call"], *request["arguments"])(served)
            if is_dataclass(value) and not isinstance(value, type):
                value = asdict(value)
            _send(connection, {"value": value})
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            _send(connection, {"raised": _told(error)})


def import_attribute(name: str) -> Any:
    """What ``module:attribute`` names.

    Example:
        >>> named("math:sqrt")(9.0)
        3.0
    """
    module, _, attribute = name.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _send(connection: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    head = _exactly(connection, LENGTH.size)
    body = head and _exactly(connection, *LENGTH.unpack(head))
    return json.loads(body) if body else None


def _exactly(connection: socket.socket, count: int) -> bytes:
    """``count`` bytes, or b"" where the connection ends before."""
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
