"""Where code that a model wrote runs: :class:`Sandbox`, whose existence means that its level holds."""

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
from agent_r1.sandbox.process import start_process
from agent_r1.sandbox.result import ExecutionResult, Verdict
from agent_r1.sandbox.selftest import layers_in_force

_log = logging.getLogger(__name__)

_UNCONFINED: WeakSet[Sandbox] = WeakSet()


def find_unconfined_sandbox() -> str | None:
    """What a sandbox of level ``none`` calls itself, where somebody in this process holds one; None where nobody does.

    It does not say who runs what there; so it is known too of a world that forgets to declare it.
    """
    if _UNCONFINED:
        gc.collect()  # one that nobody can reach any more is nobody's
    return next((sandbox.isolation for sandbox in _UNCONFINED), None)


def sandbox_level(place: object) -> str | None:
    """What a sandbox calls itself, or what somebody calls the place where code runs; None for anything else."""
    return place.isolation if isinstance(place, Sandbox) else place if isinstance(place, str) else None


def validate_sandbox(place: object) -> str | None:
    """The level that a tool or an environment was told of. Raises InvalidInput where that says nothing."""
    level = sandbox_level(place)
    if place is not None and level is None:
        do = "give a Sandbox, or say in words where code runs: 'none: ..'"
        raise InvalidInput("sandbox", got=repr(place), do=do)
    return level


class Sandbox:
    """Runs Python programs that nobody trusts. Nothing they do raises here: what happened is a value.

    Making one tries, once per process and level, what the level forbids (about a second on a busy machine).

    Args:
        config: level, limits and packages; ``SandboxConfig(level="none")`` runs programs with your own rights.

    Raises:
        InvalidInput: the level does not hold on this machine: what is missing, and what to do.

    Example:
        sandbox = Sandbox()
        outcome = await sandbox.run("print(int(input()) * 2)", stdin="21")
        outcome.ok, outcome.stdout.text            # (True, "42\\n")
        await sandbox.grade("def f(x): return x + 1", "assert f(1) == 2", calls=("f",))    # Verdict(True)
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._layers = layers_in_force(self.config)
        if self.config.level == "none":
            _log.warning("sandbox 'none': programs written by a model run with your rights, files and network")
            _UNCONFINED.add(self)

    @property
    def isolation(self) -> str:
        """The level and its layers, for the record of a run."""
        return f"{self.config.level}: {' '.join(sorted(self._layers)) or 'nothing'}"

    async def run(self, source: str, *, stdin: str | bytes = b"", limits: Limits | None = None) -> ExecutionResult:
        """Run a whole program in a fresh process: ``stdin`` is all that it can read, then comes end of file."""
        given = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        async with slot():
            process = await start_process(self._confinement(limits), given)
            if isinstance(process, ExecutionResult):
                return process
            try:
                return await process.call("program", source)
            finally:
                await process.close()

    async def grade(
        self, candidate: str, tests: str, *, calls: Sequence[str], setup: str = "", limits: Limits | None = None
    ) -> Verdict:
        """Whether a candidate's functions pass tests, found out where the candidate cannot reach.

        Args:
            candidate: source that defines functions, written by whoever is judged.
            tests: source with assertions, written by whoever is trusted; it may call what ``calls`` names.
            calls: names that the candidate has to define. In the tests they stand for functions that run in the
                candidate's process; arguments and results travel as plain data.
            setup: trusted source to run before the tests, in their process.
        """
        async with slot():
            return await grade(self._confinement(limits), candidate, tests, calls, setup)

    def interpreter(self, limits: Limits | None = None) -> Interpreter:
        """A Python that keeps its variables between calls. It has to be closed."""
        return Interpreter(self._confinement(limits))

    def _confinement(self, limits: Limits | None) -> Confinement:
        return Confinement(self._layers, limits or self.config.limits, self.config.packages)
