"""Agents of users in training: from a file, from Python, and what is refused."""

import httpx
import pytest

import agent_r1
from agent_r1 import Task, ToolEnv
from agent_r1.cli import main
from agent_r1.store.reader import RunReader

OPTIONS = {
    "steps": 1,
    "groups_per_step": 2,
    "group_size": 4,
    "evaluate_n": 2,
    "checkpoint_every": 0,
    "max_tokens": 16,
    "context": 256,
}


async def ask_twice(base_url, api_key, task):
    """Ask the same question twice, in two conversations, and answer with a constant."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for _ in range(2):
            body = {"model": "any", "messages": [{"role": "user", "content": task.messages[-1].text}]}
            headers = {"Authorization": f"Bearer {api_key}"}
            (await client.post(f"{base_url}/chat/completions", json=body, headers=headers)).raise_for_status()
    return "Bruno" if task.id.endswith("0") else "Alba"


def has_answered(trajectory, task):
    return float(trajectory.answer == "Bruno")


def test_a_function_is_trained_from_python(tmp_path):
    tasks = [Task(f"t{number}", "Who rules Alban?") for number in range(4)]
    env, run = ToolEnv(tools=[], rewards=[has_answered]), tmp_path / "run"
    report = agent_r1.train(env, tasks, agent=ask_twice, run=str(run), **OPTIONS)
    reader = RunReader(run)
    trajectories = [reader.trajectory(event.attempt) for event in reader.attempts()]
    reader.close()
    assert len(trajectories) == 8 and {len(trajectory.turns) for trajectory in trajectories} == {2}
    for trajectory in trajectories:
        assert trajectory.answer == ("Bruno" if trajectory.task_id == "t0" else "Alba")
        assert trajectory.rewards["has_answered"] == float(trajectory.task_id == "t0")
        assert [turn.parent for turn in trajectory.turns] == [None, None]
    assert set(report.table.cells) == {"base-tool-call", "trained"}
    assert main(["verify", str(run)]) == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--agent", "none.py:run"], "agent: got "),
        (["--agent", "FILE"], "give FILE.py:NAME"),
        (["--agent", "FILE:walk"], "define walk(base_url, api_key, task)"),
        (["--agent", "FILE:run", "--context_policy.name", "window"], "context_policy"),
        (["--agent", "FILE:run", "--algorithm", "vineppo-turn"], "an agent program cannot be replayed"),
        (["--gateway.max_turns", "3"], "give --agent FILE.py:NAME"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, options, line):
    file = tmp_path / "mine.py"
    file.write_text("LIMIT = 3\n\ndef run(base_url, api_key, task):\n    return None\n", "utf-8")
    arguments = [option.replace("FILE", str(file)) for option in options]
    assert main(["train", *arguments, "--run", str(tmp_path / "run"), "--quiet"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["none-such"], "model"),
        (["tiny-base", "--api_key", "short"], "api_key"),
    ],
)
def test_bad_input_of_serve_is_one_line(capsys, options, line):
    assert main(["serve", *options]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert line in error
