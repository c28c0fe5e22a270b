"""A process that forks worker processes: the server side of :mod:`agent_r1.envs.processes`.

    python -m agent_r1.envs.fork_server FD MODULE

This command imports MODULE once and then executes the requests that arrive on the control socket FD:

- ``{"fork": true}`` with an attached socket forks a worker process, which serves an object over the attached socket.
- ``{"kill": pid}`` kills the worker process ``pid``.

When the parent process ends, the control socket closes, and all worker processes are killed. The server has only one
thread, because forking a process with several threads is not safe.
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
"""The header of a message: the length of the JSON text that follows, in bytes."""


def main(descriptor: int, module: str) -> None:
    control = socket.socket(fileno=descriptor)
    import_error = _import(module)
    children: set[int] = set()
    try:
        while (received := _receive_request(control)) is not None:
            request, descriptors = received
            _reap_ended(children)
            if "kill" in request:
                _kill(request["kill"], children)
                reply: dict[str, Any] = {}
            elif import_error is not None:
                reply = {"failed": import_error}
            else:
                reply = {"pid": _fork(control, descriptors, children)}
            for number in descriptors:
                os.close(number)
            _send(control, reply)
    finally:
        for pid in tuple(children):
            _kill(pid, children)


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:
        return _describe(error)
    return None


def _receive_request(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    # Return the request and its attached file descriptors, or None if the parent process has closed the socket.
    message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
    return (json.loads(message), descriptors) if message else None


def _fork(control: socket.socket, descriptors: list[int], children: set[int]) -> int:
    pid = os.fork()
    if pid:
        children.add(pid)
        return pid
    try:
        os.setsid()  # a new process group, so that the children of the worker process are killed with it
        control.close()
        _serve(socket.socket(fileno=descriptors[0]))
    finally:
        os._exit(0)


def _kill(pid: int, children: set[int]) -> None:
    if pid in children:
        children.discard(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # for a child that has not created its process group yet
        os.waitpid(pid, 0)


def _reap_ended(children: set[int]) -> None:
    # A child can end before the processes that it started.
    while children and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        _kill(ended.si_pid, children)


def _serve(connection: socket.socket) -> None:
    # The first request creates an object, and the others call its methods.
    instance: Any = None
    while (request := _receive(connection)) is not None:
        try:
            if instance is None:
                instance, value = import_attribute(request["make"])(**request["keywords"]), None
            else:
                value = methodcaller(request["call"], *request["arguments"])(instance)
            if is_dataclass(value) and not isinstance(value, type):
                value = asdict(value)
            _send(connection, {"value": value})
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            _send(connection, {"raised": _describe(error)})


def import_attribute(name: str) -> Any:
    """Return the attribute that ``name`` (``module:attribute``) names."""
    module, _, attribute = name.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _send(connection: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Any:
    header = _read_exactly(connection, LENGTH.size)
    body = header and _read_exactly(connection, *LENGTH.unpack(header))
    return json.loads(body) if body else None


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
