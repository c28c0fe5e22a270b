"""The sandbox, which runs Python programs written by a model."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from weakref import WeakSet

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.concurrency import slot
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.grader import grade
from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.isolation import Confinement
from agent_r1.sandbox.probe import verify_isolation
from agent_r1.sandbox.process import run_program
from agent_r1.sandbox.result import ExecutionResult, Verdict

_log = logging.getLogger(__name__)

_unconfined: WeakSet[Sandbox] = WeakSet()


def find_unconfined_sandbox() -> str | None:
    """Return :attr:`Sandbox.isolation` of a sandbox in this process that does not isolate programs.

    The returned text is "none: nothing". If this process has no sandbox without isolation, return None.
    """
    if _unconfined:
        gc.collect()  # removes the sandboxes that nothing refers to any more
    return next((sandbox.isolation for sandbox in _unconfined), None)


def sandbox_level(declaration: object) -> str | None:
    """Return the isolation that a tool or an environment declares, such as ``bubblewrap: files network``.

    If ``declaration`` is a Sandbox, return :attr:`Sandbox.isolation`. If ``declaration`` is a text, return the text.
    For any other value, return None.
    """
    if isinstance(declaration, Sandbox):
        return declaration.isolation
    return declaration if isinstance(declaration, str) else None


def validate_sandbox(declaration: object) -> str | None:
    """Return the sandbox that a tool or an environment declares, as text; None if ``declaration`` is None.

    Raise InvalidInput if ``declaration`` is neither a Sandbox, nor text, nor None.
    """
    level = sandbox_level(declaration)
    if declaration is not None and level is None:
        do = "give a Sandbox, or say in words where code runs: 'none: ..'"
        raise InvalidInput("sandbox", got=repr(declaration), do=do)
    return level


class Sandbox:
    """A sandbox for untrusted Python programs. An error of a program is not raised; it is part of the result.

    The level ``bubblewrap`` isolates programs from the machine. The level ``none`` runs them with the rights of your
    user. The first sandbox of level ``bubblewrap`` in a process verifies the isolation.

    Raise InvalidInput, with the reason and the remedy, if the level is not available on this machine.

    Example:
        sandbox = Sandbox()
        result = await sandbox.run("print(int(input()) * 2)", stdin="21")
        result.ok, result.stdout.text            # (True, "42\\n")
        await sandbox.grade("def f(x): return x + 1", "assert f(1) == 2", calls=("f",))    # Verdict(True)
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._layers = verify_isolation(self.config)
        if self.config.level == "none":
            _log.warning("sandbox 'none': programs written by a model run with your rights, files and network")
            _unconfined.add(self)

    @property
    def isolation(self) -> str:
        """The isolation level and its layers as text, such as "bubblewrap: files limits network".

        The text is "none: nothing" if the sandbox has no isolation.
        """
        return f"{self.config.level}: {' '.join(sorted(self._layers)) or 'nothing'}"

    async def run(self, source: str, *, stdin: str | bytes = b"", limits: Limits | None = None) -> ExecutionResult:
        """Run a whole program in a fresh process, and return the result. ``limits`` default to the limits of
        ``config``.
        """
        data = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        async with slot():
            return await run_program(self._confine(limits), source, stdin=data)

    async def grade(
        self, candidate: str, tests: str, *, calls: Sequence[str], setup: str = "", limits: Limits | None = None
    ) -> Verdict:
        """Test the functions of a candidate, and return the verdict. The candidate cannot see or change the tests.

        Args:
            candidate: untrusted source that defines functions.
            tests: trusted source with assertions.
            calls: the names of the candidate's functions that the tests call. Arguments and results are sent as plain
                data.
            setup: trusted source that runs before the tests, in their process.
        """
        async with slot():
            return await grade(self._confine(limits), candidate, tests, calls, setup)

    def interpreter(self, limits: Limits | None = None) -> Interpreter:
        """Return an interpreter that keeps its variables between calls. The caller has to close it."""
        return Interpreter(self._confine(limits))

    def _confine(self, limits: Limits | None) -> Confinement:
        return Confinement(self._layers, limits or self.config.limits, self.config.packages)
