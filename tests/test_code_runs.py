"""Worlds that run code, from the command line: the sandbox they run in, and a step of training in each."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from sandboxed import sandbox_or_skip
from tests_tokenizer import hermes_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1 import Message, Task, ToolEnv, Trajectory, exact_match
from agent_r1.cli import main
from agent_r1.sandbox.config import Limits
from agent_r1.store.reader import RunReader
from agent_r1.training.user_task import load_task_file, make_taskset

Run = Callable[..., tuple[int, str, str]]

MBPP = {"text": "Double it.", "code": "def double(x): return 2 * x", "test_list": ["assert double(1) == 2"] * 2}
OWN = """
from agent_r1 import Message, Task, ToolEnv, exact_match
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script
from agent_r1.tools.python_tool import python_tool
from agent_r1 import SandboxConfig
env = ToolEnv([python_tool(SandboxConfig(level="none"))], [exact_match])
tasks = [Task("a", (Message.user("Who?"),), {"answers": ("x",)})]
def solutions(task):
    right, wrong = (ReferenceSolution(said, script(Message.assistant(f"<answer>{said}</answer>"))) for said in "xy")
    return ReferenceSolutions((right,), (wrong,), {"exact_match": 1.0})
"""
SMALL = [
    "--steps=1",
    "--groups_per_step=2",
    "--group_size=2",
    "--max_tokens=12",
    "--evaluate_n=2",
    "--checkpoint_every=0",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = hermes_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **small, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(json.dumps(MBPP | {"task_id": n, "text": f"Double {n}."}) for n in range(12)), "utf-8")
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


def events(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "run.db")) as base:
        return base.execute("SELECT kind, detail FROM events").fetchall()


def test_a_step_of_training_and_the_default_level_in_the_record(run: Run, data: Path, model: Path) -> None:
    sandbox = sandbox_or_skip(Limits())
    passing = ["--pass_k=2", "--pass_attempts=3", "--algorithm=ppo"]  # which learns from every attempt
    code, out, err = run(
        "train", "--taskset", "code", "--data", data, "--model", model, "--run", "r", *SMALL, *passing, "--json"
    )
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert report["measures"]["trained"]["test"] == {"first_pass_rate": 0.0, "no_second_try_rate": 1.0}
    nothing = dict.fromkeys(("one", "low", "high", "any", "likeliest"), 0.0) | {"majority": None}  # no <answer>
    assert report["pass_at_k"] == {"k": 2, "attempts": 3, "cells": {"test": nothing}}
    assert json.loads(Path("runs/r/config.json").read_text("utf-8"))["sandbox"] == "bubblewrap"
    assert ("sandbox", sandbox.isolation) in events(Path("runs/r"))
    with closing(RunReader(Path("runs/r"))) as reader:
        (step,) = reader.metrics()
    assert (step.values["first_pass_rate"], step.values["no_second_try_rate"]) == (0.0, 1.0)
    code, out, err = run("eval", "--model", "r", "--evaluate_n", "2", "--pass_k=1", "--json")
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    assert set(report["pass_at_k"]) == set(report["measures"]) == {"base-tool-call", "trained"}


def test_going_without_is_loud_and_recorded(
    run: Run, data: Path, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("train", "--taskset", "code", "--data", data, "--model", model, "--sandbox", "none")
    code, out, err = run(*asked, "--run", "r", *SMALL, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["sandbox"] == "none: nothing"
    assert "WARNING: sandbox none: programs written by a model run with your rights" in err
    assert "sandbox 'none': programs written by a model run with your rights" in caplog.text
    assert json.loads(Path("runs/r/config.json").read_text("utf-8"))["sandbox"] == "none"
    assert ("sandbox", "none: nothing") in events(Path("runs/r"))
    code, out, err = run("eval", "--model", "r", "--sandbox", "none", "--evaluate_n", 1, "--json")
    assert (
        code == 0 and json.loads(out.splitlines()[-1])["sandbox"] == "none: nothing" and "WARNING: sandbox none" in err
    )
    monkeypatch.setattr("agent_r1.sandbox.sandbox._verify_machine", lambda: refused())
    code, _, err = run("eval", "--model", "r", "--evaluate_n", 1)  # the run went without; that is asked for each time
    assert code == 2 and "accept the risk with --sandbox none" in err


def test_a_sandbox_of_a_users_file_is_recorded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, "utf-8")
    code, out, err = run("check", "own.py", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["sandbox"] == "none: nothing", err
    assert "WARNING: sandbox none" in err


@pytest.fixture(autouse=True)
def no_earlier_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.sandbox.sandbox._unconfined", WeakSet())


HEAD = """
import dataclasses
from agent_r1 import Message, Task, ToolEnv, exact_match, tool
from agent_r1.tools.python_tool import python_tool
from agent_r1 import Sandbox, SandboxConfig
from agent_r1.envs.user_env import Reply, UserEnv
tasks = [Task("a", (Message.user("Who?"),), {"answers": ("x",)})]
LEVEL = "none"
"""
WAYS = {
    "a tool of a world with a user": """
class Silent:
    async def reply(self, task, said, context):
        return Reply("", end=True)
env = UserEnv([python_tool(SandboxConfig(level=LEVEL))], Silent(), [exact_match], max_turns=1)
""",
    "the tool that tries solutions": """
from agent_r1.tasksets.code import run_tests_tool
env = ToolEnv([run_tests_tool(Sandbox(SandboxConfig(level=LEVEL)))], [exact_match], max_turns=1)
""",
    "a tool of one's own": """
place = Sandbox(SandboxConfig(level=LEVEL))
@tool
async def program(source: str) -> str:
    '''Run a program.

    Args:
        source: of it.
    '''
    return (await place.run(source)).stdout.text
env = ToolEnv([program], [exact_match], max_turns=1)
""",
    "a reward": """
place = Sandbox(SandboxConfig(level=LEVEL))
async def judged(trajectory, task):
    return float((await place.grade("def f(): return 1", "assert f() == 1", calls=("f",))).passed)
env = ToolEnv([], [judged], max_turns=1)
""",
    "an environment of one's own": """
class Own:
    def __init__(self):
        self.inner = ToolEnv([python_tool(SandboxConfig(level=LEVEL))], max_turns=1)
        self.tools = self.inner.tools
    async def open(self, task, context):
        return await self.inner.open(task, context)
env, rewards = Own(), [exact_match]
""",
    "an environment that runs code by itself, and says so": """
class Own:
    tools, sandbox = (), None if LEVEL != "none" else "none: nothing"
    async def open(self, task, context):
        return await ToolEnv([], max_turns=1).open(task, context)
env, rewards = Own(), [exact_match]
""",
    "a tool that runs code by itself, and says so": """
@tool(sandbox="none: nothing" if LEVEL == "none" else None)
def run_it(source: str) -> str:
    '''Run a program.

    Args:
        source: of it.
    '''
    exec(source)
    return "Done."
env = ToolEnv([run_it], [exact_match], max_turns=1)
""",
    "a world with a user, which says so": """
class Silent:
    async def reply(self, task, said, context):
        return Reply("", end=True)
env = UserEnv([], Silent(), [exact_match], max_turns=1, sandbox="none: nothing" if LEVEL == "none" else None)
""",
    "a reward that runs code by itself, and says so": """
def judged(trajectory, task):
    return 1.0
judged.sandbox = "none: nothing" if LEVEL == "none" else None
env, rewards = ToolEnv([], [exact_match], max_turns=1), [judged]
""",
    "a task whose answers a scorer runs": """
tasks = [dataclasses.replace(tasks[0], data={**tasks[0].data, "sandbox": None if LEVEL != "none" else "none: nothing"})]
env = ToolEnv([], [exact_match], max_turns=1)
""",
}


def write(folder: Path, way: str, level: str) -> Path:
    file = folder / "own.py"
    file.write_text((HEAD + WAYS[way]).replace('LEVEL = "none"', f"LEVEL = {level!r}"), "utf-8")
    return file


def test_code_without_a_sandbox_is_loud_and_recorded(run: Run, tmp_path: Path, model: Path) -> None:
    file = write(tmp_path, "a reward", "none")
    code, out, err = run("train", file, "--model", model, "--run", "r", *SMALL, "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["sandbox"] == "none: nothing"
    assert "WARNING: sandbox none: programs written by a model run with your rights" in err
    assert ("sandbox", "none: nothing") in events(Path("runs/r"))
    code, out, err = run("eval", file, "--model", model, "--evaluate_n", 1, "--max_tokens", 12, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["sandbox"] == "none: nothing", err
    assert "WARNING: sandbox none" in err


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_code_without_a_sandbox_is_found(way: str, tmp_path: Path) -> None:
    assert load_task_file(write(tmp_path, way, "none"), "").sandbox == "none: nothing"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_said_of_a_risk_if_the_sandbox_holds(way: str, tmp_path: Path) -> None:
    sandbox = sandbox_or_skip(Limits())
    declared = way in ("a tool of a world with a user", "the tool that tries solutions")
    assert load_task_file(write(tmp_path, way, "bubblewrap"), "").sandbox == (sandbox.isolation if declared else None)


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("swe-bench/django:latest", None),
        ("bubblewrap: files", None),
        (3, None),
        ("none", "none"),
        ("none: here", "none: here"),
    ],
)
def test_a_task_is_believed_that_nothing_holds_and_not_that_something_does(said: object, known: str | None) -> None:
    task = Task("a", (Message.user("Who?"),), {"answers": ("x",), "sandbox": said})
    assert make_taskset(ToolEnv([], [exact_match], max_turns=1), [task], "own", "").sandbox == known


def test_where_code_is_held_least_is_said_of_all_that_speak() -> None:
    def first(trajectory: Trajectory, task: Task) -> float:
        return 1.0

    def second(trajectory: Trajectory, task: Task) -> float:
        return 1.0

    first.sandbox, second.sandbox = "bubblewrap: files", "none: exec"  # type: ignore[attr-defined]
    tasks = [Task("a", (Message.user("Who?"),), {"answers": ("x",)})]
    held = ToolEnv([], [first], max_turns=1)
    assert make_taskset(held, tasks, "own", "").sandbox == "bubblewrap: files"
    assert make_taskset(held, tasks, "own", "", [second]).sandbox == "none: exec"
    loose = ToolEnv([], [first], max_turns=1, sandbox="none: a server")
    assert make_taskset(loose, tasks, "own", "").sandbox == "none: a server"
    assert make_taskset(ToolEnv([], [exact_match], max_turns=1), tasks, "own", "").sandbox is None


@pytest.mark.parametrize("task", ["code", "math"])
def test_where_the_level_does_not_hold_nothing_runs(
    task: str, run: Run, data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(9))
    problems = data if task == "code" else data.with_name("gsm8k.jsonl")
    if task == "math":
        if find_spec("math_verify") is None:  # nothing here may import it
            pytest.skip("math-verify is not installed (extra math)")
        problems.write_text("\n".join(rows), "utf-8")
    monkeypatch.setattr("agent_r1.sandbox.sandbox._verify_machine", lambda: refused())
    code, out, err = run("train", "--taskset", task, "--data", problems, "--model", model, *SMALL)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "accept the risk with --sandbox none" in err
    assert not Path("runs").exists()


def refused() -> None:
    from agent_r1.sandbox.sandbox import refusal

    raise refusal("no program bwrap", "install bubblewrap")


def test_a_level_that_would_do_nothing_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, err = run("train", "--sandbox", "none")
    assert (code, "leave it out: tinywiki" in err) == (2, True)
    file = tmp_path / "agent.py"
    file.write_text("", "utf-8")
    code, _, err = run("train", file, "--sandbox", "none")
    assert (code, "--sandbox: got it and" in err) == (2, True)
    code, _, err = run("train", "--taskset", "code", "--sandbox", "docker")
    assert (code, "it should be 'bubblewrap' or 'none'" in err) == (2, True)
