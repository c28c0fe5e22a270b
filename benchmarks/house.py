"""Measure the size of the house: how much a reader has to read, and where one update and one group of episodes lead.

    python benchmarks/house.py [--list]

The rows count ``agent_r1`` and ``environments`` together. A function counts as entered once, however often it is
called; those of other threads (the engine's, the update's) count too. ``--list`` also prints them, by file.
"""

from __future__ import annotations

import ast
import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

import agent_r1
from agent_r1.config import Layer
from agent_r1.core.trajectory import Group
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.collector import Collector, NullRecorder
from agent_r1.tasksets import build
from agent_r1.training.build import Runtime, build_runtime
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.environments import rollout_limits
from agent_r1.training.sampling import group_requests

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "agent_r1")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sizes() -> dict[str, str]:
    files = [file for folder in ("agent_r1", "environments") for file in sorted((ROOT / folder).rglob("*.py"))]
    lines = code = docstrings = comments = small = 0
    for file in files:
        rows = file.read_text("utf-8").splitlines()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
                docstrings += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        lines += len(rows)
        small += len(rows) < 60
        comments += sum(row.lstrip().startswith("#") or "  # " in row for row in rows)
        code += sum(bool(row.strip()) and not row.lstrip().startswith("#") for row in rows)
    code -= docstrings
    return {
        "files": f"{len(files):,}",
        "files under 60 lines": f"{small:,}",
        "lines": f"{lines:,}",
        "lines of code": f"{code:,}",
        "docstring lines per line of code": f"{docstrings / code:.2f}",
        "comments per 100 lines of code": f"{100 * comments / code:.1f}",
    }


def count_settings(cls: type[BaseModel]) -> int:
    """Return the number of settings, those of nested settings included."""
    kinds = [field.annotation for field in cls.model_fields.values()]
    return sum(count_settings(k) if isinstance(k, type) and issubclass(k, BaseModel) else 1 for k in kinds)


class CallCounter:
    """Records each function of the package that is entered while it is active. A context manager."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._active = False

    def record(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self._active and event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            self.functions.add((code.co_filename.removeprefix(PACKAGE).lstrip("/"), code.co_qualname))

    def __enter__(self) -> CallCounter:
        self._active = True
        sys.setprofile(self.record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._active = False

    def __str__(self) -> str:
        return f"{len({file for file, _ in self.functions})} files, {len(self.functions)} functions"


def collect(runtime: Runtime, first: int, groups: int) -> AsyncIterator[Group]:
    loop = AgentLoop(runtime.agent, runtime.taskset.env)
    limits = rollout_limits(runtime.config)
    collector = Collector(loop, runtime.taskset.scorers, NullRecorder(), "house", limits)
    tasks = runtime.taskset.tasks("train")
    requests = [next(group_requests(tasks, runtime.config, first + index)) for index in range(groups)]
    return collector.collect(requests)


async def count_calls(runtime: Runtime, episodes: CallCounter, update: CallCounter) -> None:
    # What is done only once, such as compiling a template, is done before: by four groups, and by a first update.
    async with aclosing(collect(runtime, 0, 4)) as groups:
        selected = [runtime.updater.select(group) async for group in groups]
    with episodes:
        async with aclosing(collect(runtime, 7, 1)) as groups:
            async for _ in groups:
                pass
    await runtime.updater.update(selected)
    with update:
        await runtime.updater.update(selected)
    await runtime.engine.close()


def main() -> None:
    taskset = build("tinywiki")
    config = resolve_config(TrainConfig, [Layer("house", {"group_size": 4})], taskset)
    episodes, update = CallCounter(), CallCounter()

    def record(*event: Any) -> None:
        episodes.record(*event)
        update.record(*event)

    threading.setprofile(record)  # for the threads that start from now on: the engine's and the update's
    asyncio.run(count_calls(build_runtime(config, taskset), episodes, update))
    calls = {"one GRPO update enters": update, "one group of four episodes enters": episodes}
    found = sizes() | {title: str(counter) for title, counter in calls.items()}
    found |= {"settings of train": str(count_settings(TrainConfig)), "public names": str(len(agent_r1.__all__))}
    table = Table("agent_r1 and environments", "", show_header=True)
    for row in found.items():
        table.add_row(*row)
    Console().print(table)
    if "--list" in sys.argv[1:]:
        for title, counter in calls.items():
            print(f"\n{title}")
            for file in sorted({file for file, _ in counter.functions}):
                print(f"  {file}: {', '.join(sorted(name for own, name in counter.functions if own == file))}")


if __name__ == "__main__":
    main()
