"""The table of how agents use the results of ``try``: counts of scripted attempts are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark_scripts import load_benchmark

from agent_r1.core.trajectory import Trajectory
from agent_r1.envs import ToolEnv
from agent_r1.sandbox import Sandbox
from agent_r1.tasksets import build
from agent_r1.tasksets.code_repair.tool import bug_of

BENCHMARK = load_benchmark("repair_feedback")


def test_the_shares_are_those_of_scripted_attempts(
    sandbox: Sandbox, rows_file: Callable[..., Path], run_attempts: Callable[..., list[Trajectory]]
) -> None:
    row: dict[str, Any] = {"text": "Add.", "test_list": ["assert add(2, 5) == 7", "assert add(9, 4) == 13"]}
    row |= {"task_id": 1, "code": "def add(x, y):\n    return x + y"}
    others = [row | {"task_id": number, "text": f"Add {number} ways."} for number in (2, 3)]
    taskset = build("code-repair", rows_file(row, *others), None, 0)
    (task,) = taskset.tasks("test")[:1]
    right, wrong = (f"<answer>{line}</answer>" for line in (bug_of(task).repair, "return y"))
    tried = '<tool_call>{"name": "try", "arguments": {"edit": "return y"}}</tool_call>'
    assert isinstance(taskset.env, ToolEnv)
    before = 1 + sum(message.role == "assistant" for message in taskset.env.examples)

    def attempt(*texts: str) -> Trajectory:
        (found,) = run_attempts(taskset, [task], lambda text: texts[text.count("<|im_start|>assistant") - before])
        return found

    found = BENCHMARK.shares(
        [attempt(right), attempt(wrong), attempt(tried, right), attempt(tried, wrong), attempt("")]
    )
    counts = {name: (share.having, share.of, share.functions) for name, share in found.items()}
    assert counts == {
        "fixed": (2, 5, 1),
        "valid form": (4, 5, 1),
        "first fix": (1, 5, 1),
        "corrected": (1, 4, 1),
        "kept after pass": (0, 0, 0),
        "kept after fail": (1, 2, 1),
    }
    assert str(found["kept after pass"]) == "-" and str(found["fixed"]).endswith("2 of 5")
