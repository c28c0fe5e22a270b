"""Count the files and functions of the package that one GRPO update, and one group of four episodes, enter.

    python benchmarks/call_graph.py [--list]

``--list`` also prints the functions, by file.
A function is counted once, however often it is called; those of other threads (the engine, the update) count too.
Fewer is easier to follow: the figures of each version are in docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import FrameType
from typing import Any

import agent_r1
from agent_r1.config import Layer
from agent_r1.core.trajectory import Group
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.collector import Collector
from agent_r1.rollout.scripted_agent import NullRecorder, no_gate
from agent_r1.tasksets import build
from agent_r1.training.build import Runtime, build_runtime, group_requests, rollout_limits
from agent_r1.training.config import TrainConfig, resolve_config

PACKAGE = agent_r1.__path__[0]


class CallCounter:
    """Records each function of the package that is entered while it is active. A context manager."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._active = False

    def record(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if self._active and event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            self.functions.add((code.co_filename, code.co_qualname))

    def __enter__(self) -> CallCounter:
        self._active = True
        sys.setprofile(self.record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self._active = False

    def __str__(self) -> str:
        return f"{len({file for file, _ in self.functions})} files, {len(self.functions)} functions"

    def listing(self) -> str:
        """Return the functions, one line per file."""
        by_file: dict[str, list[str]] = {}
        for file, name in sorted(self.functions):
            by_file.setdefault(file.removeprefix(PACKAGE).lstrip("/"), []).append(name)
        return "\n".join(f"  {file}: {', '.join(names)}" for file, names in by_file.items())


def collect(runtime: Runtime, first: int) -> AsyncIterator[Group]:
    collector = Collector(
        AgentLoop(runtime.agent, runtime.taskset.env),
        runtime.taskset.scorers,
        NullRecorder(),
        "call graph",
        rollout_limits(runtime.config),
    )
    requests = [next(group_requests(runtime.taskset.tasks("train"), runtime.config, first + n)) for n in range(4)]
    return collector.collect(requests[:1] if first else requests, no_gate)


async def count(runtime: Runtime, episodes: CallCounter, update: CallCounter) -> None:
    async with aclosing(collect(runtime, 0)) as groups:
        selected = [runtime.updater.select(group) async for group in groups]
    with episodes:
        async with aclosing(collect(runtime, 7)) as groups:
            async for _ in groups:
                pass
    await runtime.updater.update(selected)
    with update:
        await runtime.updater.update(selected)
    await runtime.engine.close()


def main() -> None:
    taskset = build("tinywiki", None, None, 0)
    config = resolve_config(TrainConfig, [Layer("call graph", {"group_size": 4})], taskset)
    episodes, update = CallCounter(), CallCounter()

    def record(*event: Any) -> None:
        episodes.record(*event)
        update.record(*event)

    threading.setprofile(record)  # for the threads that start from now on: the engine's and the update's
    asyncio.run(count(build_runtime(config, taskset), episodes, update))
    for title, counter in (("one group of four episodes", episodes), ("one GRPO update", update)):
        print(f"{title}: {counter}")
        if "--list" in sys.argv[1:]:
            print(counter.listing())


if __name__ == "__main__":
    main()
