"""Games run in processes of their own: a failure there affects its own episode only."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from textwrap import dedent

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.envs import games
from agent_r1.envs.games import GameEnv, episode_return
from agent_r1.envs.processes import start_process
from agent_r1.rewards.scoring import FunctionScorer

TASK = Task("t", (Message.system("Play."),), {"seed": 7})


def hostile(first: str = "ready", max_turns: int = 10, timeout: float = 20.0) -> GameEnv:
    return GameEnv("json", "hostile_games:Hostile", {"first": first}, max_turns, timeout)


def test_an_episode_is_a_conversation_with_rewards(play_episode) -> None:
    first, (echoed, over) = asyncio.run(play_episode(hostile(), TASK, "hello", "end"))
    assert first == "ready"
    assert [message.text for message in echoed.messages] == ["hello"] and echoed.messages[0].role == "user"
    assert echoed.end is None and echoed.results[0].data == 0.25
    assert over.end == "terminal" and over.messages == () and over.results[0].data == 1.0


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("exit", "step failed: SystemExit: 3"),
        ("die", "its process ended"),
        ("flood", "its process ended"),
        ("no json", "TypeError"),
    ],
)
def test_a_game_that_fails_fails_its_episode(action: str, reason: str, play_episode) -> None:
    with pytest.raises(AgentR1Error, match=reason):
        asyncio.run(play_episode(hostile(), TASK, action))


def test_a_game_that_cannot_start_fails_its_episode(play_episode) -> None:
    with pytest.raises(AgentR1Error, match="it does not start"):
        asyncio.run(play_episode(hostile("raise at start"), TASK))
    with pytest.raises(AgentR1Error, match="open failed: ValueError: the game broke"):
        asyncio.run(play_episode(hostile("raise"), TASK))
    with pytest.raises(AgentR1Error, match="ModuleNotFoundError: No module named 'no_such_package'"):
        asyncio.run(start_process("no_such_package", "hostile_games:Hostile", {}, 60.0))


def test_a_game_that_hangs_is_killed_with_its_child_processes(has_ended) -> None:
    async def hang() -> list[int]:
        episode = await hostile(timeout=4.0).open(TASK, RolloutContext(AttemptId("run", "t", 0, 0), 0))
        pids = [int((await episode.step(say(text))).messages[0].text) for text in ("pid", "child")]
        with pytest.raises(AgentR1Error, match="no answer within 4 seconds"):
            await episode.step(say("hang"))
        with pytest.raises(AgentR1Error, match="its process has ended"):
            await episode.step(say("hello"))
        await episode.close()
        return pids

    assert all(has_ended(pid) for pid in asyncio.run(hang()))


def say(text: str) -> Action:
    return Action(Message.assistant(text), text)


def test_closing_kills_the_process_even_if_the_game_does_not_close(play_episode, has_ended, monkeypatch) -> None:
    monkeypatch.setattr(games, "CLOSE_SECONDS", 0.5)
    for first in ("pid", "hang at close"):
        _, transitions = asyncio.run(play_episode(hostile(first), TASK, "pid"))
        assert has_ended(int(transitions[0].messages[0].text))


def test_a_cancelled_episode_leaves_no_process(play_episode, has_ended) -> None:
    pids: list[int] = []

    async def cancelled() -> None:
        episode = await hostile().open(TASK, RolloutContext(AttemptId("run", "t", 0, 0), 0))
        pids.append(int((await episode.step(say("pid"))).messages[0].text))
        try:
            await asyncio.wait_for(episode.step(say("hang")), 0.2)
        finally:
            await episode.close()

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert has_ended(pids[0])


def test_no_process_outlives_the_trainer(has_ended) -> None:
    program = dedent("""
        import asyncio, time
        from agent_r1.envs.processes import start_process
        async def main():
            process = await start_process("json", "hostile_games:Hostile", {}, 20.0)
            print((await process.call("step", "pid", timeout=600)).value["text"], flush=True)
            print((await process.call("step", "child", timeout=600)).value["text"], flush=True)
            asyncio.create_task(process.call("step", "hang", timeout=500))
            await asyncio.sleep(500)
        asyncio.run(main())
    """)
    path = os.pathsep.join(filter(None, sys.path))
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path},
    )
    assert running.stdout is not None
    pids = [int(running.stdout.readline()) for _ in range(2)]
    assert not any(os.path.exists(f"/proc/{pid}") is False for pid in pids)
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert all(has_ended(pid) for pid in pids)


def test_concurrent_games_do_not_share_the_global_random(play_episode) -> None:
    async def drawn(env: GameEnv) -> list[str]:
        played = await asyncio.gather(*(play_episode(env, TASK, "draw", "draw") for _ in range(6)))
        return [" ".join(transition.messages[0].text for transition in transitions) for _, transitions in played]

    before = random.getstate()
    assert len(set(asyncio.run(drawn(hostile())))) == 1
    assert random.getstate() == before


def test_a_broken_game_ends_as_environment_failed_and_others_continue() -> None:
    # Imported here: the agent loop brings torch, which the room under test must not need.
    from agent_r1.renderers.template_renderer import TemplateRenderer
    from agent_r1.rollout.agent_loop import Agent, AgentLoop
    from agent_r1.rollout.scripted import ScriptedEngine

    renderer = TemplateRenderer(hermes_tokenizer())

    async def live(text: str) -> tuple[Status, str | None]:
        agent = Agent(ScriptedEngine(renderer, lambda prompt: text), renderer, SamplingParams(max_tokens=50), 1000)
        env, context = hostile(max_turns=2, timeout=4.0), RolloutContext(AttemptId("run", text, 0, 0), 0)
        (trajectory,) = await AgentLoop(agent, env).run(TASK, context)
        return trajectory.status, trajectory.reason

    async def all_of(*texts: str) -> list[tuple[Status, str | None]]:
        return await asyncio.gather(*map(live, texts))

    hung, broken, over, out = asyncio.run(all_of("hang", "raise", "end", "hello"))
    assert hung == (Status.ENVIRONMENT_FAILED, "AgentR1Error: json: step failed: no answer within 4 seconds")
    assert broken[0] is Status.ENVIRONMENT_FAILED
    assert over == (Status.COMPLETED, None) and out == (Status.OUT_OF_TURNS, None)


def test_the_return_is_given_per_turn(make_trajectory, play_episode) -> None:
    _, transitions = asyncio.run(play_episode(hostile(), TASK, "hello", "end"))
    trajectory = make_trajectory(*((say("x"), transition.results) for transition in transitions))
    assert episode_return(trajectory, TASK) == (0.25, 1.0)
    (rewards,) = asyncio.run(FunctionScorer({"episode_return": episode_return}).score([trajectory], TASK))
    assert rewards == {"episode_return": (0.25, 1.0)}
