"""The questions of bfcl-eval: held-out ids, schemas, the package's verdicts, and calls of a policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.environment import env_of
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.tasksets import build
from agent_r1.training.check import check
from agent_r1.training.progress import SilentProgress
from environments.bfcl.package import calls_are_correct

needs_bfcl = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed (docs/environments)")
SINGLE = "environments/bfcl"


@pytest.fixture(scope="module")
def single() -> TaskSet:
    return build(SINGLE)


def passed(taskset: TaskSet, n: int) -> tuple[int, int]:
    report = check(taskset, SilentProgress(), n=n)
    assert report.failures == ()
    return report.gold.passed, report.wrong.passed


@needs_bfcl
def test_possible_answers_pass_and_wrong_calls_fail(single: TaskSet) -> None:
    assert passed(single, n=20) == (80, 480)


@needs_bfcl
def test_training_never_sees_a_held_out_question(single: TaskSet) -> None:
    tested = [single.tasks(split) for split in single.evaluation]
    assert [len({task.id for task in split}) for split in tested] == [40, 40, 40]
    texts = {task.messages[-1].text for split in tested for task in split}
    train = single.tasks("train")
    assert len(train) == 650 and not texts & {task.messages[-1].text for task in train}
    assert single.tasks("train") == build(SINGLE, seed=7).tasks("train")
    with pytest.raises(InvalidInput, match="live_simple"):
        single.tasks("live_simple")


@needs_bfcl
def test_functions_become_json_schemas(single: TaskSet) -> None:
    kinds = {"string", "integer", "number", "boolean", "array", "object"}

    def types(schema: Any) -> set[str]:
        inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
        return {schema["type"]}.union(*map(types, inner))

    tools = [tool for task in single.tasks("train") for tool in env_of(single.env, task).tools]
    assert set().union(*(types(tool.parameters) for tool in tools)) == kinds
    assert not [tool.name for tool in tools if "." in tool.name]


def written(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


Play = Callable[..., list[Trajectory]]


def rewards(attempt: Trajectory) -> tuple[Any, Any]:
    return attempt.rewards["correct"], attempt.rewards["function"]


@needs_bfcl
def test_calls_of_a_policy_are_judged(single: TaskSet, run_attempts: Play) -> None:
    by_id = {task.id: task for task in (*single.tasks("train"), *single.tasks("parallel"))}
    area, songs = by_id["simple_python_0"], by_id["parallel_0"]
    right = written("calculate_triangle_area", {"base": 10, "height": 5})

    def play(task: Task, text: str) -> Trajectory:
        (attempt,) = run_attempts(single, [task], [text])
        return attempt

    assert rewards(play(area, right)) == (1.0, 1.0)
    assert rewards(play(area, written("calculate_triangle_area", {"base": "10", "height": 5}))) == (0.0, 1.0)
    assert rewards(play(area, written("calculate_triangle_area", {"base": [{"a": {}}], "height": None}))) == (0.0, 1.0)
    for text in (right[:-30], written("calculate_triangle_area", "10"), "base 10, height 5", right + right):
        assert rewards(play(area, text)) == (0.0, 0.0), text
    malformed = play(area, right.replace("}}", "}"))
    assert (rewards(malformed), malformed.turns[0].results[0].error) == ((0.0, 0.0), "malformed call")
    assert play(area, written("no_function", {})).turns[0].results[0].error == "unknown tool"
    both = [
        written("spotify_play", {"artist": who, "duration": n}) for who, n in (("Maroon 5", 15), ("taylor swift", 20))
    ]
    assert rewards(play(songs, "\n".join(both))) == (1.0, 1.0)  # in any order, and in any case of letters
    assert rewards(play(songs, both[0])) == (0.0, 0.0)


def test_without_the_package_one_line_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['bfcl_eval'] = None; from agent_r1.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", hidden, "check", SINGLE], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert "pip install --no-deps bfcl-eval" in done.stderr


@needs_bfcl
def test_settings_show_solved_requests_and_choose_what_is_trained(single: TaskSet, run_attempts: Play) -> None:
    shown = build(SINGLE, data=Path("recipes/bfcl_data.toml"))
    assert {task.data["category"] for task in shown.tasks("train")} == {"simple", "multiple"}
    assert shown.tasks("parallel") == single.tasks("parallel")
    task = shown.tasks("simple")[0]
    (with_examples,) = run_attempts(shown, [task], lambda prompt: "no")
    (plain,) = run_attempts(single, [task], ["no"])
    opening = with_examples.turns[0].new_messages
    called = [message.calls[0].name for message in opening if message.calls]
    assert called == ["math_add", "weather_forecast", "play_song"]
    assert plain.turns[0].new_messages == task.messages
    assert opening[-1].text.endswith(task.messages[1].text)
    assert passed(shown, n=5) == (20, 120)


@needs_bfcl
def test_a_value_that_the_checker_cannot_read_is_wrong(single: TaskSet) -> None:
    task = next(task for task in single.tasks("train") if task.id == "simple_python_14")
    function, gold = "calculate_derivative", {"function": "3x**2 + 2x - 1", "x_value": 0.0}
    functions, truth = task.data["functions"], task.data["truth"]
    for value, right in ((0.0, True), (0, True), (10**400, False), ([[]], False), ({"a": 1}, False), (None, False)):
        calls = [{function: {**gold, "x_value": value}}]
        assert calls_are_correct("simple_python", functions, calls, truth) is right
