"""What a call costs in the sandbox: a fresh interpreter, a kept one, a verdict; by level and layer.

    python benchmarks/sandbox.py [--calls N]

Milliseconds of wall clock, of one call after the other; configurations take turns, so that a busy machine slows all
alike. "fresh" is a process started, run and gone; "plain" is the interpreter alone, without any sandbox or protocol.
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

from agent_r1.sandbox import Interpreter, Sandbox, SandboxConfig
from agent_r1.sandbox.isolation import Confinement, IsolationLayer, interpreter
from agent_r1.sandbox.selftest import layers_in_force, run

Call = Callable[[], Awaitable[object]]
PROGRAM = "print(sum(range(100)))"


async def plain() -> None:
    command = [interpreter()[0], "-I", "-S", "-c", PROGRAM]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    await process.wait()


def calls(sandbox: Sandbox, kept: Interpreter) -> dict[str, Call]:
    """What is measured, by name."""
    layers = layers_in_force(sandbox.config)
    without = {
        f"fresh, without {layer}": lambda layer=layer: run(Confinement(layers - {layer}, sandbox.config.limits), PROGRAM)
        for layer in IsolationLayer
        if layer in layers
    }
    return {
        "plain python": plain,
        "fresh, no sandbox": lambda: run(Confinement(frozenset(), sandbox.config.limits), PROGRAM),
        "fresh, default": lambda: sandbox.run(PROGRAM),
        **without,
        "kept, default": lambda: kept.run(PROGRAM),
        "verdict of two tests": lambda: sandbox.grade(
            "def f(n): return n + 1", "assert f(1) == 2\nassert f(2) == 3", calls=("f",)
        ),
    }


async def measure(count: int) -> dict[str, list[float]]:
    sandbox = Sandbox(SandboxConfig())
    kept = sandbox.interpreter()
    measured = calls(sandbox, kept)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(count + 1):
        for name, call in measured.items():
            began = time.perf_counter()
            await call()
            if turn:  # the first of each warms up
                seconds[name].append(time.perf_counter() - began)
    await kept.close()
    return seconds


def shown(seconds: dict[str, list[float]]) -> Table:
    table = Table("milliseconds per call", "p50", "p95", "least")
    for name, values in seconds.items():
        table.add_row(name, *(f"{1000 * value:.1f}" for value in figures(values)))
    return table


def figures(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20)[-1], min(values)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a call costs in the sandbox.")
    parser.add_argument("--calls", type=int, default=40, help="calls of each kind")
    with suppress(KeyboardInterrupt):
        Console().print(shown(asyncio.run(measure(parser.parse_args().calls))))


if __name__ == "__main__":
    main()
