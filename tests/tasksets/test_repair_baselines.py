"""The policies without a model for ``code-repair``: what they earn is known for functions with two mutations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmark_scripts import load_benchmark

from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets import build
from agent_r1.tasksets.code_repair.tool import bug_of

BENCHMARK = load_benchmark("repair_baselines")


@pytest.mark.parametrize(
    ("policy", "turns", "low", "high"),
    [("the function unchanged", 4, 0, 0), ("one random edit", 4, 0.1, 0.8), ("random edits until one passes", 4, 1, 1)],
)
def test_enumeration_repairs_what_has_few_mutations_and_the_bug_itself_nothing(
    policy: str, turns: int, low: float, high: float, sandbox: Sandbox, rows_file: Callable[..., Path]
) -> None:
    rows = [
        {
            "task_id": number,
            "text": f"Add {number} ways.",
            "code": f"def add_{number}(x, y):\n    return x + y",
            "test_list": [f"assert add_{number}(2, 5) == 7", f"assert add_{number}(9, 4) == 13"],
        }
        for number in range(12)
    ]
    taskset = build("code-repair", rows_file(*rows), None, 0)
    assert all(1 <= len(BENCHMARK.possible_edits(bug_of(task))) <= 3 for task in taskset.tasks("train"))
    shares = asyncio.run(BENCHMARK.fix_rate(taskset, "train", turns, BENCHMARK.POLICIES[policy], 2))
    assert len(shares) == len(taskset.tasks("train")) and low <= sum(shares) / len(shares) <= high
