"""Human play: typed lines go through the environment and the scorers of the task set."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from rich.console import Console

from agent_r1.cli import main
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet, script, tool_call
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match
from agent_r1.tools.function_tool import tool
from agent_r1.training.play import PlayResult, format_signature, parse_line, play


@tool
def look_up(title: str, pages: int = 1) -> str:
    """Find a page."""
    return f"{title} is ruled by Bruno.\x1b[2J"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = (look_up.spec, add.spec)


def taskset(**changes: object) -> TaskSet:
    tasks = [Task(str(i), (Message.user(f"Who rules town {i}?"),), {"answers": ("Bruno",)}, "test") for i in range(9)]
    env = ToolEnv([look_up, add], max_turns=4, call_rewards=lambda call, result: {"found": float(result.ok)})
    made = TaskSet("towns", env, lambda split: tasks, (FunctionScorer({"exact_match": exact_match}),))
    return replace(made, **changes)  # type: ignore[arg-type]


TOWNS = taskset()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PlayResult, str]]:
    def typed(*lines: str, taskset: TaskSet = TOWNS, number: int | None = 3) -> tuple[PlayResult, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        shown = io.StringIO()
        return play(taskset, Console(file=shown, width=200), number=number), shown.getvalue()

    return typed


def test_an_episode_is_played_and_scored(typed: Callable) -> None:
    played, shown = typed("look_up town 3", "<answer>Bruno</answer>")
    assert played == PlayResult("3", "completed", 2, {"exact_match": 1.0, "found": 1.0}, ("Bruno",))
    assert "user: Who rules town 3?" in shown and "tool: town 3 is ruled by Bruno." in shown
    assert "tool: look_up(title: string, pages?: integer)  Find a page." in shown
    assert played.text == "completed after 2 turns\nrewards: exact_match 1, found 1\ngold: Bruno"


def test_the_right_answer_comes_from_the_task_or_a_gold_solution(typed: Callable) -> None:
    one_text = [Task("a", (Message.user("Who?"),), {"answers": "Bruno"}, "test")]
    played, _ = typed("no", taskset=taskset(tasks=lambda split: one_text, scorers=()), number=0)
    assert played.answers == ("Bruno",)

    def solutions(task: Task) -> ReferenceSolutions:
        tool_first = ReferenceSolution("looked up", script(tool_call("look_up", title="Alba")))
        return ReferenceSolutions(
            (tool_first, ReferenceSolution("said", script(Message.assistant("It is 5.")))), (), {"correct": 1.0}
        )

    kept = [Task("a", (Message.user("Who?"),), {"answer": "5"}, "test")]
    shown, _ = typed("no", taskset=taskset(tasks=lambda split: kept, scorers=(), solutions=solutions), number=0)
    assert shown.answers == ("It is 5.",) and shown.text.endswith("gold: It is 5.")
    broken, _ = typed(
        "no", taskset=taskset(tasks=lambda split: kept, scorers=(), solutions=lambda task: 1 / 0), number=0
    )
    assert broken.answers == ()


@pytest.mark.parametrize(
    ("line", "feedback"),
    [
        ('/look_up {"title": "town', "The tool call could not be read and was not run"),
        ('/lookup {"title": "town"}', "There is no tool 'lookup'. Did you mean 'look_up'?"),
        ('/look_up {"name": "town"}', "look_up was not run. Wrong arguments"),
    ],
)
def test_a_malformed_call_gets_the_same_feedback_as_a_policys(typed: Callable, line: str, feedback: str) -> None:
    played, shown = typed(line, '/add {"a": 1, "b": 2}', "<answer>Bruno</answer>")
    assert feedback in shown and "tool: 3" in shown
    assert played.turns == 3 and played.rewards == {"exact_match": 1.0, "found": 1.0}


def test_the_end_of_a_pipe_leaves_the_episode_unscored(typed: Callable) -> None:
    played, _ = typed("look_up town 3")
    assert played == PlayResult("3", "left", 1) and played.text == "left after 1 turn; nothing was scored"


def test_output_cannot_control_the_terminal(typed: Callable) -> None:
    assert "\x1b" not in typed("look_up town 3", "<answer>Bruno</answer>")[1]


def test_a_failure_of_the_environment_is_shown(typed: Callable) -> None:
    def unable(call: object, result: object) -> dict[str, float]:
        raise ValueError("no reward for that")

    played, _ = typed("look_up x", taskset=taskset(env=ToolEnv([look_up], call_rewards=unable)))
    assert played.status == "environment_failed" and "no reward for that" in played.text and played.rewards == {}


def test_lines_become_calls_or_plain_messages() -> None:
    (call,) = parse_line("look_up the big town", TOOLS).calls
    assert (call.name, call.arguments) == ("look_up", {"title": "the big town"})
    assert parse_line('look_up {"title": "x", "pages": 2}', TOOLS).calls[0].arguments == {"title": "x", "pages": 2}
    assert parse_line("/add", TOOLS).calls[0].arguments == {}
    assert parse_line("look up the town", TOOLS) == Message.assistant("look up the town")
    assert parse_line("lo <answer>x</answer>", TOOLS) == Message.assistant("lo <answer>x</answer>")
    assert format_signature(add.spec) == "add(a: integer, b: integer)  Add two numbers."


def until(terminal: int, mark: bytes, seconds: float = 600) -> bytes:
    """Return the output of a terminal up to a mark."""
    shown, end = b"", time.monotonic() + seconds
    while mark not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.5)[0]:
            with suppress(OSError):  # the process has ended
                shown += os.read(terminal, 4096)
    assert mark in shown, shown
    return shown


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    process, terminal = pty.fork()
    if process == 0:  # with standard streams of its own instead of pytest's
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, mode, encoding="utf-8") for number, mode in enumerate("rww")
        )
        code = main(["play", "tinywiki", "--split", "style-a", "--number", "0"])
        sys.stdout.flush()
        os._exit(code)
    yield process, terminal
    os.close(terminal)


def test_ctrl_c_leaves_with_one_line_and_exit_code_0(terminal: tuple[int, int]) -> None:
    process, screen = terminal
    until(screen, b"\r\n> ")
    os.write(screen, b"search Lumaban\n")
    assert b"Lumaban: " in until(screen, b"\r\n> ")
    time.sleep(0.5)  # a signal during the start of the line editor would wait for the next key
    os.write(screen, b"\x03")
    assert until(screen, b"scored\r\n").split(b"\r\n")[1:] == [b"left after 1 turn; nothing was scored", b""]
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_the_last_line_of_output_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("<answer>x</answer>\n"))
    assert main(["play", "tinywiki", "--number", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (data["status"], data["turns"], data["rewards"]["em"]) == ("completed", 1, 0.0)
