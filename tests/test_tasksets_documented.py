"""The examples in docs/tasksets.md run: a task file with a user, and a game."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.training.user_task import load_task_file

ROOT = Path(__file__).parents[1]
_, USER, GAME = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "tasksets.md").read_text(), re.DOTALL | re.MULTILINE
)


def test_the_user_in_the_document_answers_a_question(tmp_path: Path) -> None:
    (tmp_path / "guest.py").write_text(USER)
    taskset = load_task_file(tmp_path / "guest.py", "a/model")
    (task,) = taskset.tasks("train")

    async def play() -> list[object]:
        episode = await taskset.env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), 0))
        texts = ("What shall it be?", "Well.", "<answer>tea</answer>")
        steps = [await episode.step(Action(Message.assistant(text), text)) for text in texts]
        return [(step.messages[0].text if step.messages else None, step.end) for step in steps]

    assert asyncio.run(play()) == [("Something hot.", None), ("I am waiting.", None), (None, "terminal")]


def test_the_game_in_the_document_can_be_played() -> None:
    names: dict[str, object] = {}
    exec(GAME, names)

    class Scripted:
        async def ask(self, text: str) -> str:
            return "2"

    players: Sequence[Scripted] = (Scripted(), Scripted())
    assert asyncio.run(names["nim"](players, Task("nim", (), {"pile": 4}), random.Random(0))) == [0.0, 1.0]  # type: ignore[operator]
