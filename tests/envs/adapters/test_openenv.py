"""Episodes on a local OpenEnv server, through the package's own client."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.envs.openenv import OpenEnv
from agent_r1.tools.tool_errors import ToolErrorKind

if importlib.util.find_spec("openenv") is None:
    pytest.skip("openenv is not installed (extra openenv)", allow_module_level=True)


@pytest.fixture(scope="module")
def url(serve_script) -> Iterator[str]:
    yield serve_script(Path(__file__).parent / "openenv_server.py")[0]


def guessing(url: str, timeout: float = 10.0) -> OpenEnv:
    return OpenEnv(url, action=lambda text: {"number": int(text)}, sessions=2, timeout=timeout)


def test_an_episode_runs_to_its_end(url: str, play_episode) -> None:
    env = guessing(url)
    (_, task) = env.tasks(2, instruction="Guess.")
    first, (wrong, right) = asyncio.run(play_episode(env, task, "7", "1"))
    assert first == "Guess.\n\na number below 10"
    assert (wrong.messages[0].text, wrong.end, wrong.results[0].data) == ("wrong", None, 0.0)
    assert (right.messages, right.end, right.results[0].data) == ((), "terminal", 1.0)


def test_the_server_is_reset_with_the_data_of_the_task(url: str, play_episode) -> None:
    task = Task("t", (), {"seed": 5, "reset": {"largest": 3}})
    first, (right,) = asyncio.run(play_episode(guessing(url), task, "2"))
    assert first == "a number below 3" and right.end == "terminal"
    _, (by_attempt,) = asyncio.run(play_episode(guessing(url), Task("t", ()), "4", seed=14))
    assert by_attempt.end == "terminal"


def test_text_that_is_not_an_action_is_explained(url: str, play_episode) -> None:
    env = OpenEnv(url, action=lambda text: {"number": int(text)} if text.isdigit() else {"word": text})
    _, (refused,) = asyncio.run(play_episode(env, env.tasks(1)[0], "seven"))
    assert refused.results[0].error == ToolErrorKind.INVALID_ARGUMENTS
    assert 'refused the action {"word": "seven"}' in refused.messages[0].text
    _, (unmade,) = asyncio.run(play_episode(guessing(url), env.tasks(1)[0], "seven"))
    assert "That is no action" in unmade.messages[0].text and unmade.end is None


def test_the_episode_is_truncated_after_max_turns(url: str, play_episode) -> None:
    env = OpenEnv(url, action=lambda text: {"number": int(text)}, max_turns=1)
    _, (last,) = asyncio.run(play_episode(env, env.tasks(1)[0], "5"))
    assert last.end == "truncated"


def test_more_episodes_than_sessions_wait(url: str, play_episode) -> None:
    env = guessing(url)

    async def many() -> list[str]:
        played = await asyncio.gather(*(play_episode(env, task, "5") for task in env.tasks(8)))
        return [transitions[0].results[0].parts[0].text for _, transitions in played]

    assert sorted(asyncio.run(many())) == ["right"] + ["wrong"] * 7


def test_an_episode_waits_while_all_sessions_are_taken(url: str, play_episode) -> None:
    async def crowded() -> str:
        client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        others = [await client(url).connect() for _ in range(2)]
        for other in others:
            await other.reset()
        playing = asyncio.create_task(play_episode(guessing(url), Task("t", (), {"seed": 3}), "3"))
        await asyncio.sleep(0.5)
        assert not playing.done()
        for other in others:
            await other.close()
        return str((await playing)[1][0].end)

    assert asyncio.run(crowded()) == "terminal"


def test_a_server_that_stays_full_fails_the_episode(url: str, play_episode) -> None:
    async def crowded() -> None:
        client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        others = [await client(url).connect() for _ in range(2)]
        for other in others:
            await other.reset()
        try:
            await play_episode(guessing(url, timeout=0.5), Task("t", ()), "3")
        finally:
            for other in others:
                await other.close()

    with pytest.raises(AgentR1Error, match=r"had no session free for 0\.5 seconds"):
        asyncio.run(crowded())


def test_a_server_that_raises_hangs_or_crashes_fails_the_episode(serve_script, play_episode) -> None:
    own, _ = serve_script(Path(__file__).parent / "openenv_server.py")
    task = guessing(own).tasks(1)[0]
    with pytest.raises(RuntimeError, match="the game broke"):
        asyncio.run(play_episode(guessing(own), task, "99"))
    assert asyncio.run(play_episode(guessing(own), task, "0"))[1][0].end == "terminal"
    with pytest.raises(AgentR1Error, match="did not answer within 3 seconds"):
        asyncio.run(play_episode(guessing(own, timeout=3.0), task, "98"))
    assert asyncio.run(play_episode(guessing(own), task, "0"))[1][0].end == "terminal"
    with pytest.raises(Exception, match="no close frame"):
        asyncio.run(play_episode(guessing(own), task, "97"))
    with pytest.raises(ConnectionError, match="Failed to connect"):
        asyncio.run(play_episode(guessing(own), task, "0"))


def test_a_cancelled_episode_releases_its_session(url: str, play_episode) -> None:
    env = OpenEnv(url, action=lambda text: {"number": int(text)}, sessions=1)

    async def cancelled() -> None:
        episode = await env.open(env.tasks(1)[0], RolloutContext(AttemptId("run", "t", 0, 0), 0))
        waiting = asyncio.create_task(play_episode(env, env.tasks(1)[0], "0"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()
        await episode.close()
        await asyncio.wait_for(play_episode(env, env.tasks(1)[0], "0"), 600)

    asyncio.run(cancelled())
