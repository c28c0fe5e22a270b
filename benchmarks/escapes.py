"""What the sandbox stops, and which layer stops it: attacks, bombs and forged verdicts, counted.

    python benchmarks/escapes.py [--short] [--json]

Every attack of ``agent_r1/env/sandbox/inside/attacks.py`` is tried in a process of its own under the default level;
as a control with one layer removed at a time, with pairs removed that stand in for each other, and with none at
all. An orphan is a process that left its session and outlives its program. Then ten candidates that do not solve
their problem forge a verdict, before the judge and before a harness that runs tests beside the candidate. All
limits are small: what goes off does no harm. ``--short``: only the default level, no sandbox, and the verdicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Limits, Sandbox, SandboxConfig
from agent_r1.sandbox.inside.attacks import ATTACKS
from agent_r1.sandbox.isolation import Confinement, IsolationLayer
from agent_r1.sandbox.result import ExecutionResult
from agent_r1.sandbox.process import start_process
from agent_r1.sandbox.selftest import SMALL, World, assault, layers_in_force, taskset

NAMES = tuple(ATTACKS)
AT_ONCE = 4
ORPHAN_SECONDS = 1.0

PAIRS = ({IsolationLayer.NETWORK, IsolationLayer.SYSCALLS}, {IsolationLayer.PROCESSES, IsolationLayer.FILES}, {IsolationLayer.CGROUP, IsolationLayer.LIMITS})

ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(3)
    os._exit(0)
os.wait()
"""

TESTS = "assert solve(3) == 12\nassert solve(5) == 30"
LOOP = "for right, said in zip((12, 30), map(solve, (3, 5))):\n    assert said == right"
"""The same tests in another form, for the forgery that aims at it."""
SOLUTION = "def solve(n): return n * (n + 1)"
ENDS_THE_LOOP = "ends the tests' loop"
FORGERIES = {
    "exits": "import os\nprint('PASSED', flush=True)\nos._exit(0)",
    "raises SystemExit": "def solve(n):\n    print('PASSED')\n    raise SystemExit(0)",
    "equals everything": "class Yes(int):\n    def __eq__(self, other): return True\ndef solve(n): return Yes()",
    "equals, and is no number": "class Yes:\n    def __eq__(self, other): return True\ndef solve(n): return Yes()",
    "patches builtins": (
        "import builtins\nclass Fine(builtins.AssertionError): pass\nprint('PASSED')\n"
        "builtins.AssertionError = Fine\ndef solve(n): raise SystemExit"
    ),
    "reads the tests in frames": (
        "import re, sys\ndef solve(n):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in frame.f_globals.values():\n"
        "            found = isinstance(value, str) and re.search(rf'solve.{n}. == (.+)', value)\n"
        "            if found: return int(found.group(1))\n        frame = frame.f_back"
    ),
    "writes reports everywhere": (
        "import os\nfor fd in range(1, 256):\n    for text in (b'PASSED\\n', b'o\\0\\0\\0\\0'):\n"
        "        try: os.write(fd, text)\n        except OSError: pass\nos._exit(0)"
    ),
    "ends the harness": (
        "import ctypes, os\nprint('PASSED', flush=True)\n"
        "def solve(n):\n    ctypes.CDLL(None).exit(0)\nfor pid in (os.getppid(),):\n"
        "    try: os.kill(pid, 0)\n    except OSError: pass"
    ),
    "answers for the line": (
        "import json, os, sys\nframe = sys._getframe()\nwhile frame:\n    line = frame.f_locals.get('line')\n"
        '    if isinstance(line, int):\n        for text in (b\'{"defined": ["solve"]}\', b\'{"passed": true}\'):\n'
        "            os.write(line, len(text).to_bytes(4, 'little') + text)\n    frame = frame.f_back\n"
        "print('PASSED', flush=True)\nos._exit(0)"
    ),
    ENDS_THE_LOOP: "def solve(n): raise StopIteration",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What got through in one configuration."""

    name: str
    hits: tuple[str, ...]
    tried: int


async def tried(name: str, layers: frozenset[IsolationLayer], outside: World) -> Row:
    """Every attack in a process of its own, and the orphan."""
    places = asyncio.Semaphore(AT_ONCE)
    confinement = Confinement(layers, SMALL)

    async def one(attack: str) -> bool:
        async with places:
            return any(attempt.hit for attempt in (await assault(confinement, outside, [attack]))[1])

    hits = await asyncio.gather(*map(one, NAMES))
    orphan = ["orphan"] if await leaves_an_orphan(confinement) else []
    got_through = [attack for attack, hit in zip(NAMES, hits, strict=True) if hit]
    return Row(name, (*got_through, *orphan), len(NAMES) + 1)


async def leaves_an_orphan(confinement: Confinement) -> bool:
    """Whether somebody still holds the program's end of a pipe a second after the program was closed."""
    read, write = os.pipe()
    process = await start_process(confinement, extra=(write,))
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        if isinstance(process, ExecutionResult):
            raise RuntimeError(process.error)
        await process.call("program", ORPHAN)
        await process.close()
        os.set_blocking(read, False)
        await asyncio.sleep(ORPHAN_SECONDS)
        return pipe.read(1) is None


def configurations(short: bool) -> list[tuple[str, frozenset[IsolationLayer]]]:
    default = layers_in_force(SandboxConfig())
    if short:
        return [("default", default), ("no sandbox", frozenset())]
    single = [(f"without {layer}", default - {layer}) for layer in IsolationLayer if layer in default]
    double = [(f"without {' and '.join(sorted(pair))}", default - pair) for pair in PAIRS]
    return [("default", default), *single, *double, ("no sandbox", frozenset())]


Judge = Callable[[Sandbox, str, str], Awaitable[bool]]
"""Whether a candidate passes tests."""


async def judged(sandbox: Sandbox, candidate: str, tests: str) -> bool:
    return (await sandbox.grade(candidate, tests, calls=("solve",))).passed is True


async def beside(sandbox: Sandbox, candidate: str, tests: str) -> bool:
    """The usual harness, as the control: tests and candidate in one process, which says that it passed."""
    program = f"TESTS = {tests!r}\n{candidate}\nexec(TESTS)\nprint('PASSED')"
    return "PASSED" in (await sandbox.run(program)).stdout.text


async def forged(judge: Judge) -> tuple[str, ...]:
    """The forgeries that this judge takes for solutions. Raises where it does not know a solution."""
    sandbox = Sandbox(SandboxConfig(limits=Limits(seconds=5)))
    if not (await judge(sandbox, SOLUTION, TESTS) and await judge(sandbox, SOLUTION, LOOP)):
        raise RuntimeError("the judge refuses a right solution")
    tests = {ENDS_THE_LOOP: LOOP}
    tries = (judge(sandbox, candidate, tests.get(name, TESTS)) for name, candidate in FORGERIES.items())
    taken = await asyncio.gather(*tries)
    return tuple(name for name, passed in zip(FORGERIES, taken, strict=True) if passed)


async def measure(short: bool) -> list[Row]:
    with taskset() as outside:
        rows = [await tried(name, layers, outside) for name, layers in configurations(short)]
    verdicts = (("verdicts: judge", judged), ("verdicts: tests beside the candidate", beside))
    return [*rows, *[Row(name, await forged(judge), len(FORGERIES)) for name, judge in verdicts]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="the default level, no sandbox, and the verdicts")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    try:
        configurations(short=True)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    rows = asyncio.run(measure(options.short))
    for row in rows:
        print(f"{row.name:40} {len(row.hits):3} of {row.tried:3}  {' '.join(row.hits) if len(row.hits) < 20 else ''}")
    if options.json:
        print(json.dumps({row.name: asdict(row) for row in rows}))
    held = all(set(row.hits) <= not_promised() for row in rows if row.name in ("default", "verdicts: judge"))
    return 0 if held else 1


def not_promised() -> set[str]:
    """What the default level does not claim to stop here: without a cgroup memory is limited per process only."""
    return set() if IsolationLayer.CGROUP in layers_in_force(SandboxConfig()) else {"memory_of_many"}


if __name__ == "__main__":
    sys.exit(main())
