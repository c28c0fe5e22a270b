"""The exam of a problem: its hidden tests and the code around them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Sandbox, Verdict
from agent_r1.tasksets.code.source import imported_packages

_HAND = "handed_by_name"
_HANDER = f"\ndef {_HAND}(name, names=globals()): return names[name]\n"
_SEEDED = "import random\nrandom.seed(0)\n"


@dataclass(frozen=True, slots=True)
class Exam:
    """How a solution is tested. Everything except the solution is trusted source.

    ``calls`` are the names that the solution must define. In the tests' process ``setup`` runs before ``tests``; in
    the
    solution's process ``given`` runs before the solution and ``after`` runs behind it. ``handed`` names objects that
    ``after``
    creates for the tests: instances of the solution's own classes, which the tests can only pass back.

    Example:
        Exam(("area",), "assert area(square) == 4", after="square = Square(2)", handed=("square",))
    """

    calls: tuple[str, ...]
    tests: str
    setup: str = ""
    given: str = ""
    after: str = ""
    handed: tuple[str, ...] = ()

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        """Return the verdict of :meth:`Sandbox.grade`. Tests that draw random numbers draw the same ones each time."""
        handing = "".join(f"{name} = {_HAND}({name!r})\n" for name in self.handed)
        calls = (*self.calls, _HAND) if self.handed else self.calls
        seeded = _SEEDED if "random" in self.tests else ""
        return await sandbox.grade(
            self._candidate(solution), handing + self.tests, calls=calls, setup=f"{self.setup}\n{seeded}"
        )

    def _candidate(self, solution: str) -> str:
        """Return three separate sources: a solution may begin with ``from __future__``, and its lines count from 1."""
        after = self.after + (_HANDER if self.handed else "")
        parts = [(source, name) for source, name in zip((self.given, solution, after), _FILES, strict=True) if source]
        return "\n".join(f"exec(compile({source!r}, {name!r}, 'exec'))" for source, name in parts)


_FILES = ("given.py", "solution.py", "after.py")


def packages_for(exams: Iterable[Exam]) -> tuple[Path, ...]:
    """Return the folders that the sandbox must show for the packages that exams import (EvalPlus imports numpy).

    Raises InvalidInput if a package is not installed.
    """
    packages = {name for exam in exams for name in imported_packages(f"{exam.setup}\n{exam.tests}")}
    folders = set()
    for name in sorted(packages - set(sys.stdlib_module_names)):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise InvalidInput(
                "--data", got=f"tests that import {name}, which is not installed", do=f"pip install {name}"
            )
        folders.add(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0])
    return tuple(sorted(folders))
