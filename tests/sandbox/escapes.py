"""Count the attacks, bombs and forged verdicts that get through, and show which layer blocks them.

    python -m tests.sandbox.escapes [--short] [--json]        from the root of the repository

Each attack of tests/sandbox/attacks.py is tried in a process of its own: under the default level, with each layer
removed, with pairs of layers removed that overlap, and without any. An orphan is a process that left its session and
outlives its program. Then ten candidates that do not solve their problem forge a verdict, before the grader and before
a harness that runs tests in the candidate's process. All limits are small, so that no attack does harm. ``--short``:
only the default level, no sandbox, and the verdicts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.isolation import Confinement, IsolationLayer
from agent_r1.sandbox.process import ExecutionResult, run_program, start_process
from agent_r1.sandbox.sandbox import Sandbox, verify_isolation
from tests.sandbox.attacks import ATTACKS

SOURCE = (Path(__file__).parent / "attacks.py").read_text("utf-8")
LIMITS = Limits(seconds=10, memory=128 * 2**20, processes=8, disk=2**20, open_files=32)
NAMES = tuple(ATTACKS)
MAX_CONCURRENT = 4
ORPHAN_SECONDS = 1.0
VARIABLE = "AGENT_R1_CANARY"

OVERLAPS = (
    {IsolationLayer.NETWORK, IsolationLayer.SYSCALLS},
    {IsolationLayer.PROCESSES, IsolationLayer.FILES},
    {IsolationLayer.CGROUP, IsolationLayer.LIMITS},
)

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
LOOP = "for expected, actual in zip((12, 30), map(solve, (3, 5))):\n    assert actual == expected"
"""The same tests as a loop, for the forgery that ends loops."""
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
    "answers on the connection": (
        "import json, os, sys\nframe = sys._getframe()\nwhile frame:\n    number = frame.f_locals.get('connection')\n"
        '    if isinstance(number, int):\n        for text in (b\'{"defined": ["solve"]}\', b\'{"passed": true}\'):\n'
        "            os.write(number, len(text).to_bytes(4, 'little') + text)\n    frame = frame.f_back\n"
        "print('PASSED', flush=True)\nos._exit(0)"
    ),
    ENDS_THE_LOOP: "def solve(n): raise StopIteration",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The attacks that got through in one configuration."""

    name: str
    hits: tuple[str, ...]
    tried: int


@contextmanager
def make_targets() -> Iterator[dict[str, Any]]:
    """Provide a secret file, an environment variable, listening sockets and a victim process."""
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-r1-"))
        os.chmod(folder, 0o755)  # so that file permissions cannot stand in for the layer
        secret = Path(folder, "secret")
        secret.write_text(token, "utf-8")
        leaked = os.open(secret, os.O_RDONLY)
        stack.callback(os.close, leaked)
        os.set_inheritable(leaked, True)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (f"\0{token}", str(Path(folder, "line"))):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(address)
            unix.listen()
        os.environ[VARIABLE] = token
        stack.callback(os.environ.pop, VARIABLE)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        stack.callback(victim.kill)
        yield LIMITS.model_dump() | {
            "token": token,
            "secret": str(secret),
            "folder": folder,
            "variable": VARIABLE,
            "host": socket.gethostname(),
            "port": listener.getsockname()[1],
            "abstract": token,
            "victim": victim.pid,
        }


async def run_attack(confinement: Confinement, targets: dict[str, Any], name: str) -> bool:
    """Return whether an attack succeeds in a process of its own."""
    result = await run_program(confinement, f"{SOURCE}\nrun_attacks({targets!r}, {[name]!r})")
    return result.stdout.text.startswith("hit ")


async def try_attacks(name: str, layers: frozenset[IsolationLayer], targets: dict[str, Any]) -> Row:
    """Run all attacks and the orphan under some layers."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)
    confinement = Confinement(layers, LIMITS)

    async def run(attack: str) -> bool:
        async with slots:
            return await run_attack(confinement, targets, attack)

    hits = await asyncio.gather(*map(run, NAMES))
    orphan = ["orphan"] if await leaves_an_orphan(confinement) else []
    return Row(name, (*(attack for attack, hit in zip(NAMES, hits, strict=True) if hit), *orphan), len(NAMES) + 1)


async def leaves_an_orphan(confinement: Confinement) -> bool:
    """Return whether a process still holds the program's end of a pipe a second after the program was closed."""
    read, write = os.pipe()
    process = await start_process(confinement, descriptors=(write,))
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
    default = verify_isolation(SandboxConfig())
    if short:
        return [("default", default), ("no sandbox", frozenset())]
    single = [(f"without {layer}", default - {layer}) for layer in IsolationLayer if layer in default]
    double = [(f"without {' and '.join(sorted(pair))}", default - pair) for pair in OVERLAPS]
    return [("default", default), *single, *double, ("no sandbox", frozenset())]


Grade = Callable[[Sandbox, str, str], Awaitable[bool]]
"""Returns whether a candidate passes tests."""


async def grade(sandbox: Sandbox, candidate: str, tests: str) -> bool:
    return (await sandbox.grade(candidate, tests, calls=("solve",))).passed is True


async def grade_in_one_process(sandbox: Sandbox, candidate: str, tests: str) -> bool:
    """The control: tests and candidate run in one process, which prints that it passed."""
    program = f"TESTS = {tests!r}\n{candidate}\nexec(TESTS)\nprint('PASSED')"
    return "PASSED" in (await sandbox.run(program)).stdout.text


async def forge_verdicts(name: str, grade: Grade) -> Row:
    """Return the forgeries that pass. Raises RuntimeError if a correct solution does not."""
    sandbox = Sandbox(SandboxConfig(limits=Limits(seconds=5)))
    if not (await grade(sandbox, SOLUTION, TESTS) and await grade(sandbox, SOLUTION, LOOP)):
        raise RuntimeError("a correct solution does not pass")
    tests = {ENDS_THE_LOOP: LOOP}
    tries = (grade(sandbox, candidate, tests.get(name, TESTS)) for name, candidate in FORGERIES.items())
    results = await asyncio.gather(*tries)
    return Row(name, tuple(name for name, passed in zip(FORGERIES, results, strict=True) if passed), len(FORGERIES))


async def measure(short: bool) -> list[Row]:
    with make_targets() as targets:
        rows = [await try_attacks(name, layers, targets) for name, layers in configurations(short)]
    rows.append(await forge_verdicts("verdicts: grader", grade))
    rows.append(await forge_verdicts("verdicts: tests in the candidate's process", grade_in_one_process))
    return rows


def known_gaps() -> set[str]:
    """Return the attacks that get through here: without a cgroup, memory is limited per process."""
    return set() if IsolationLayer.CGROUP in verify_isolation(SandboxConfig()) else {"memory_of_many"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--short", action="store_true", help="the default level, no sandbox, and the verdicts")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    try:
        verify_isolation(SandboxConfig())
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    rows = asyncio.run(measure(options.short))
    for row in rows:
        print(f"{row.name:45} {len(row.hits):3} of {row.tried:3}  {' '.join(row.hits) if len(row.hits) < 20 else ''}")
    if options.json:
        print(json.dumps({row.name: asdict(row) for row in rows}))
    blocked = all(set(row.hits) <= known_gaps() for row in rows if row.name in ("default", "verdicts: grader"))
    return 0 if blocked else 1


if __name__ == "__main__":
    sys.exit(main())
