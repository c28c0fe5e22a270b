"""Measure the cost of the sandbox: of starting it, of a call in a fresh or a kept interpreter, and of a verdict.

    python benchmarks/sandbox.py [--calls N]

Milliseconds of wall clock, one call after the other. The configurations take turns, so that other load on the machine
affects all of them. "fresh" is a process that is started, run and ended; "plain python" is the interpreter alone,
without a sandbox or protocol; "first sandbox" is the probe of the isolation layers, made once per process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from rich.console import Console
from rich.table import Table

from agent_r1.sandbox.config import SandboxConfig
from agent_r1.sandbox.isolation import ALL_LAYERS, Confinement, IsolationLayer, interpreter
from agent_r1.sandbox.process import run_program
from agent_r1.sandbox.sandbox import Interpreter, Sandbox, find_broken_layers, verify_isolation

Call = Callable[[], Awaitable[object]]
PROGRAM = "print(sum(range(100)))"


async def run_plain_python() -> None:
    command = [interpreter()[0], "-I", "-S", "-c", PROGRAM]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    await process.wait()


def make_calls(sandbox: Sandbox, kept: Interpreter) -> dict[str, Call]:
    """Return the calls to measure, by name."""
    layers, limits = verify_isolation(sandbox.config), sandbox.config.limits
    without = {
        f"fresh, without {layer}": lambda layer=layer: run_program(Confinement(layers - {layer}, limits), PROGRAM)
        for layer in IsolationLayer
        if layer in layers
    }
    return {
        "plain python": run_plain_python,
        "fresh, no sandbox": lambda: run_program(Confinement(frozenset(), limits), PROGRAM),
        "fresh, default": lambda: sandbox.run(PROGRAM),
        **without,
        "kept, default": lambda: kept.run(PROGRAM),
        "verdict of two tests": lambda: sandbox.grade(
            "def f(n): return n + 1", "assert f(1) == 2\nassert f(2) == 3", calls=("f",)
        ),
        "first sandbox": lambda: find_broken_layers(ALL_LAYERS),
    }


async def measure(count: int) -> dict[str, list[float]]:
    """Return the seconds of each call, by name."""
    sandbox = Sandbox(SandboxConfig())
    kept = sandbox.interpreter()
    calls = make_calls(sandbox, kept)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(count + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            await call()
            if index:  # the first call of each is a warm-up
                seconds[name].append(time.perf_counter() - start)
    await kept.close()
    return seconds


def make_table(seconds: dict[str, list[float]]) -> Table:
    table = Table("milliseconds per call", "p50", "p95", "minimum")
    for name, values in seconds.items():
        table.add_row(name, *(f"{1000 * value:.1f}" for value in summarize(values)))
    return table


def summarize(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20)[-1], min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of a call in the sandbox.")
    parser.add_argument("--calls", type=int, default=40, help="calls of each kind")
    with suppress(KeyboardInterrupt):
        Console().print(make_table(asyncio.run(measure(parser.parse_args().calls))))


if __name__ == "__main__":
    main()
