"""Ranks that start at once: each is a fork of a process that has imported torch and transformers."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

from preloaded import FORKSERVER

from agent_r1.trainer.ranks import serve_rank


class ForkedProcess:
    """A process that calls ``target(*arguments)``, with the methods of subprocess.Popen that a group of ranks calls."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._process = FORKSERVER.Process(target=target, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None
        return self._process.exitcode


class ForkedRank(ForkedProcess):
    """The process of a rank that reads requests from ``pipe``."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(serve_rank, pipe)
