"""The examples in docs/worlds.md are what they say: a world that loads, a game that is played."""

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
from agent_r1.training.user_task import load_world

ROOT = Path(__file__).parents[1]
_, USER, GAME = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "worlds.md").read_text(), re.DOTALL | re.MULTILINE
)


def test_the_user_of_the_documents_answers_a_question(tmp_path: Path) -> None:
    (tmp_path / "guest.py").write_text(USER)
    world = load_world(tmp_path / "guest.py", "a/model")
    (task,) = world.tasks("train")

    async def live() -> list[object]:
        episode = await world.env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), 0))
        said = ("What shall it be?", "Well.", "<answer>tea</answer>")
        steps = [await episode.step(Action(Message.assistant(text), text)) for text in said]
        return [(step.messages[0].text if step.messages else None, step.end) for step in steps]

    assert asyncio.run(live()) == [("Something hot.", None), ("I am waiting.", None), (None, "terminal")]


def test_the_game_of_the_documents_is_played() -> None:
    names: dict[str, object] = {}
    exec(GAME, names)

    class Scripted:
        async def ask(self, text: str) -> str:
            return "2"

    players: Sequence[Scripted] = (Scripted(), Scripted())
    assert asyncio.run(names["nim"](players, Task("nim", (), {"pile": 4}), random.Random(0))) == [0.0, 1.0]  # type: ignore[operator]
