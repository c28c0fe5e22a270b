"""Fixtures for the tests of the adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent_r1.core.environment import Env, RolloutContext, Transition
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId


@pytest.fixture(scope="session")
def play_episode() -> Callable[..., object]:
    async def play_episode(env: Env, task: Task, *actions: str, seed: int = 0) -> tuple[str, list[Transition]]:
        episode = await env.open(task, RolloutContext(AttemptId("run", task.id, 0, 0), seed))
        try:
            steps = [Action(Message.assistant(text), text) for text in actions]
            return episode.start[-1].text, [await episode.step(action) for action in steps]
        finally:
            await episode.close()

    return play_episode
