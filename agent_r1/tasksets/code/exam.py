"""The exam of a problem: the tests that nobody is shown, and what stands around them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Sandbox, Verdict
from agent_r1.tasksets.code.source import imported

_HAND = "handed_by_name"
_HANDER = f"\ndef {_HAND}(name, names=globals()): return names[name]\n"
_SEEDED = "import random\nrandom.seed(0)\n"


@dataclass(frozen=True, slots=True)
class Exam:
    """How a solution is examined. All but the solution is trusted source.

    ``calls`` are the names that it has to define. In the tests' process ``setup`` is run before the ``tests``; in the
    solution's process ``given`` is run before it and ``after`` behind it. ``handed`` names what ``after`` makes for
    the tests: objects of the solution's own classes, which the tests can only hand back.

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
        """The verdict of :meth:`Sandbox.judge`. Tests that draw at random draw the same numbers each time."""
        handing = "".join(f"{name} = {_HAND}({name!r})\n" for name in self.handed)
        calls = (*self.calls, _HAND) if self.handed else self.calls
        seeded = _SEEDED if "random" in self.tests else ""
        return await sandbox.judge(
            self._candidate(solution), handing + self.tests, calls=calls, setup=f"{self.setup}\n{seeded}"
        )

    def _candidate(self, solution: str) -> str:
        """Three sources, each by itself: a solution may begin with ``from __future__``, and its lines count from 1."""
        after = self.after + (_HANDER if self.handed else "")
        parts = [(source, name) for source, name in zip((self.given, solution, after), _FILES, strict=True) if source]
        return "\n".join(f"exec(compile({source!r}, {name!r}, 'exec'))" for source, name in parts)


_FILES = ("given.py", "solution.py", "after.py")


def packages_for(exams: Iterable[Exam]) -> tuple[Path, ...]:
    """The folders that the sandbox has to show, for the packages that exams import (EvalPlus's import numpy).

    Raises InvalidInput where a package is not installed.
    """
    packages = {name for exam in exams for name in imported(f"{exam.setup}\n{exam.tests}")}
    folders = set()
    for name in sorted(packages - set(sys.stdlib_module_names)):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise InvalidInput(
                "--data", got=f"tests that import {name}, which is not installed", do=f"pip install {name}"
            )
        folders.add(Path(spec.origin).parents[1 if spec.submodule_search_locations else 0])
    return tuple(sorted(folders))
