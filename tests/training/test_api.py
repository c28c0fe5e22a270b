"""The door in Python."""

import asyncio
from pathlib import Path

import pytest

import agent_r1
from agent_r1 import Message, Task, ToolEnv, exact_match
from agent_r1.core.errors import InvalidInput
from agent_r1.training.progress import SilentProgress

ENV = ToolEnv(tools=[], rewards=[exact_match])
TASKS = [Task(str(n), (Message.user("Say x."),), {"answers": ("x",)}) for n in range(2)]


def train(place: Path) -> object:
    small = {"steps": 1, "groups_per_step": 1, "group_size": 2, "pass_k": 0, "monitor": {"idle_steps": 9}}
    return agent_r1.train(ENV, TASKS, run=str(place), progress=SilentProgress(), max_tokens=2, evaluate_n=1, **small)


def test_where_an_event_loop_runs_it_says_so_before_anything_is_loaded(tmp_path: Path) -> None:
    async def notebook() -> None:
        train(tmp_path / "run")

    with pytest.raises(InvalidInput, match=r"agent_r1.train: got a thread whose event loop .* asyncio\.to_thread"):
        asyncio.run(notebook())
    assert not (tmp_path / "run").exists()
