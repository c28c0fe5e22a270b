"""The table of how agents use the results of ``try``: counts of scripted attempts are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmark_scripts import load_benchmark

from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets import build
from agent_r1.tasksets.code_repair.tool import bug_of

BENCHMARK = load_benchmark("repair_feedback")

ROWS = [
    {
        "task_id": number,
        "text": f"Add {number} ways.",
        "code": "def add(x, y):\n    return x + y",
        "test_list": ["assert add(2, 5) == 7", "assert add(9, 4) == 13"],
        "test_setup_code": "",
    }
    for number in (1, 2, 3)
]


def test_the_shares_are_those_of_scripted_attempts(
    sandbox: Sandbox, rows_file: Callable[..., Path], run_attempts: Callable[..., list[Trajectory]]
) -> None:
    taskset = build("code-repair", rows_file(*ROWS), None, 0)
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


@pytest.mark.usefixtures("sandbox")
def test_the_table_has_a_row_for_each_model_and_each_kind_of_results(
    rows_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tiny-base cannot write Python, so all its attempts fail; what counts is that they are made and counted."""
    data = rows_file(*ROWS)
    files = [data.with_name(f"{name}.toml") for name in ("true", "shuffled")]
    for file in files:
        shuffle = "true" if file.stem == "shuffled" else "false"
        file.write_text(f'data = "{data.name}"\nproposals = 3\nshuffle_feedback = {shuffle}\n')
    config = data.with_name("run.toml")
    config.write_text("max_tokens = 3\ncontext = 4096\n")
    options = ["--model", "tiny-base", "--config", str(config), "--data", *map(str, files), "--attempts", "2"]
    monkeypatch.setattr("sys.argv", ["repair_feedback.py", *options, "--temperature", "0.9"])
    BENCHMARK.main()
    shown = capsys.readouterr().out
    assert shown.count("tiny-base") == 2 and shown.count("0 of 2") >= 2
    assert "true" in shown and "shuffled" in shown
