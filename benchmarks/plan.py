"""Compare the step times that ``agent-r1 plan`` predicts with the measured ones of runs that it has not seen.

    python benchmarks/plan.py --folder runs/plan

All runs train tiny-base on TinyWiki in one process. Costs are measured in two runs: one with instant tools, and one
with slow tools and small batches. The others differ in the size of groups and steps, in the duration of tools and in
staleness. Their attempts are drawn from the first run, so nothing of a predicted run is used but its settings, and how
much longer than their CPU time its forward and backward passes took, because other programs ran. Runs that the folder
already holds are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_r1.config import Layer, resolve
from agent_r1.core.profile import mean_profile
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.search import found_page, search
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.plan import P99, plan_recorded
from agent_r1.training.plan_config import PlanConfig
from agent_r1.training.progress import SilentProgress
from agent_r1.training.step_costs import RecordedRun, load_factor, read_profiled_run

SPREAD = 0.8
"""The standard deviation of the logarithm of a tool's duration."""

STEPS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its name, its settings, and the median duration of its tools in seconds."""

    name: str
    settings: Mapping[str, Any]
    tool_seconds: float = 0.0


MEASURED = (
    Case("base", {"groups_per_step": 8, "group_size": 8}),
    Case("slow tools", {"groups_per_step": 8, "group_size": 4}, 0.5),
)
PREDICTED = (
    Case("large groups", {"groups_per_step": 4, "group_size": 32}),
    Case("few attempts", {"groups_per_step": 4, "group_size": 4}, 0.2),
    Case("slow tools, stale", {"groups_per_step": 8, "group_size": 8, "max_staleness": 1}, 0.5),
)


def with_latency(taskset: TaskSet, median: float, seed: int) -> TaskSet:
    """Return TinyWiki with a search that takes a random time (log-normal)."""
    draw = random.Random(seed)

    async def slow(**arguments: Any) -> Any:
        await asyncio.sleep(median * math.exp(SPREAD * draw.gauss(0, 1)))
        return await search.function(**arguments)

    env = ToolEnv(tools=[replace(search, function=slow)], max_turns=5, call_rewards=found_page)
    return replace(taskset, env=env, variants={})


def record(case: Case, folder: Path, seed: int) -> RecordedRun:
    """Train, unless the folder holds the run already, and return the recorded run."""
    place = folder / f"{case.name} {seed}"
    if not place.exists():
        taskset = build("tinywiki", None, None, 0)
        taskset = with_latency(taskset, case.tool_seconds, seed) if case.tool_seconds else taskset
        short = {"steps": STEPS, "evaluate_every": 0, "evaluate_n": 1, "pass_k": 0, "splits": ("style-a",)}
        values = {**case.settings, **short, "seed": seed, "checkpoint_every": 0, "profile": STEPS, "run": str(place)}
        values |= {"record_tokens": 0, "trainer.learning_rate": 3e-5}
        run.train(resolve_config(TrainConfig, [Layer("benchmark", values)], taskset), taskset, SilentProgress())
    return read_profiled_run(place)


def predict(case: Case, known: list[RecordedRun], load: float, seed: int) -> float:
    """Return the predicted seconds of a step."""
    high = case.tool_seconds * math.exp(SPREAD * P99)
    values = {**case.settings, "tool_seconds": case.tool_seconds, "tool_p99": high, "clock": "cpu", "load": load}
    plan = plan_recorded(resolve(PlanConfig, [Layer("benchmark", {**values, "seed": seed})]), known)
    return plan.predictions[1 if "max_staleness" in case.settings else 0].step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/plan"), help="where the runs are")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    options = parser.parse_args()
    for seed in range(options.seeds):  # kinds alternate, so that a change of the machine's load affects all of them
        for case in (*MEASURED, *PREDICTED):
            record(case, options.folder, seed)
    for seed in range(options.seeds):
        known = [record(case, options.folder, seed) for case in MEASURED]
        for case in PREDICTED:
            found = record(case, options.folder, seed)
            load = load_factor(found, "cpu")
            measured = mean_profile(found.profiles[1:]).total.seconds
            predicted = predict(case, known, load, seed)
            error = 100 * (predicted / measured - 1)
            print(
                f"{case.name}, seed {seed}: predicted {predicted:.2f} s, measured {measured:.2f} s ({error:+.0f} %),",
                end=" ",
            )
            print(f"other programs slow the machine {load:.1f} times")


if __name__ == "__main__":
    main()
