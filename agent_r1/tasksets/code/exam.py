"""The exam of a problem: the hidden tests, and the code that runs before and after a solution."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.process import Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.source import imported_packages

_HAND = "handed_by_name"
_HANDER = f"\ndef {_HAND}(name, names=globals()): return names[name]\n"
_SEEDED = "import random\nrandom.seed(0)\n"


@dataclass(frozen=True, slots=True)
class Exam:
    """The trusted code that tests an untrusted solution. The tests and the solution run in two processes.

    Attributes:
        calls: the names that the solution must define.
        tests: the hidden tests.
        setup: code that runs before the tests, in the process of the tests.
        given: code that runs before the solution, in the process of the solution.
        after: code that runs after the solution, in the process of the solution.
        handed: the names of objects that the tests get from the process of the solution. The code in the attribute
            ``after`` creates these objects from classes of the solution. The tests can use the objects only as
            arguments of the solution's functions.

    Example:
        Exam(calls=("area",), tests="assert area(square) == 4", after="square = Square(2)", handed=("square",))
    """

    calls: tuple[str, ...]
    tests: str
    setup: str = ""
    given: str = ""
    after: str = ""
    handed: tuple[str, ...] = ()

    async def judge(self, sandbox: Sandbox, solution: str) -> Verdict:
        """Test a solution in a sandbox, and return the verdict.

        Random numbers in the tests are the same for every solution.
        """
        handing = "".join(f"{name} = {_HAND}({name!r})\n" for name in self.handed)
        calls = (*self.calls, _HAND) if self.handed else self.calls
        seeded = _SEEDED if "random" in self.tests else ""
        return await sandbox.grade(
            self._candidate(solution), handing + self.tests, calls=calls, setup=f"{self.setup}\n{seeded}"
        )

    def _candidate(self, solution: str) -> str:
        """Return the source of a program that runs ``self.given``, then ``solution``, then ``self.after``.

        Each of the three sources is compiled by itself, so that a solution can begin with ``from __future__``.
        """
        after = self.after + (_HANDER if self.handed else "")
        parts = [(source, name) for source, name in zip((self.given, solution, after), _FILES, strict=True) if source]
        return "\n".join(f"exec(compile({source!r}, {name!r}, 'exec'))" for source, name in parts)


_FILES = ("given.py", "solution.py", "after.py")


def packages_for(exams: Iterable[Exam]) -> tuple[Path, ...]:
    """Return the folders of the packages that hidden tests import, for ``SandboxConfig.packages``.

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
