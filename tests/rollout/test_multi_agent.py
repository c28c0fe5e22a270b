"""Games of several agents, and a policy as a model client."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.envs.multi_agent import Game, Player, PlayerDropped
from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, chat_client, play_game
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER

TASK = Task("nim", (Message.system("Play."),), {"pile": 5})
CHAT = TemplateRenderer(load_tokenizer(str(TINY_BASE_FOLDER)))


class Failing(ScriptedEngine):
    """An engine that cannot generate."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        raise EngineError("gone")


def agent(reply: Callable[[str], str], engine: type[ScriptedEngine] = ScriptedEngine, context: int = 4096) -> Agent:
    return Agent(engine(CHAT, reply), CHAT, SamplingParams(max_tokens=64), context)


async def nim(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
    """The player that takes the last one wins. Each player learns the other's move."""
    pile, turn = task.data["pile"], 0
    while pile > 0:
        taken = int(await players[turn].ask(f"pile {pile}"))
        players[1 - turn].tell(f"they took {taken}")
        pile, turn = pile - taken, 1 - turn
    return [0.0, 1.0] if turn == 0 else [1.0, 0.0]


def play(
    game: Game, *agents: Agent, seed: int = 0, seconds: float = 60, deadlines: Sequence[float | None] = (None, None)
) -> tuple[Trajectory, ...]:
    """Play one match. ``deadlines`` are the seconds until each player's deadline."""

    async def run() -> tuple[Trajectory, ...]:
        now = asyncio.get_running_loop().time()
        times = [None if own is None else now + own for own in deadlines]
        contexts = [RolloutContext(AttemptId("run", "nim", player, 0), player, own) for player, own in enumerate(times)]
        return await asyncio.wait_for(play_game(game, agents, TASK, contexts, seed, seconds), 600)

    return asyncio.run(run())


def texts(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in trajectory.messages]


def test_each_player_has_its_own_trajectory_and_return() -> None:
    first, second = play(nim, agent(lambda prompt: "2"), agent(lambda prompt: "1"))
    assert texts(first) == [
        ("system", "Play."),
        ("user", "pile 5"),
        ("assistant", "2"),
        ("user", "they took 1\npile 2"),
        ("assistant", "2"),
    ]
    assert texts(second) == [("system", "Play."), ("user", "they took 2\npile 3"), ("assistant", "1")]
    assert (first.rewards, second.rewards) == ({"return": 1.0}, {"return": 0.0})
    assert (first.status, second.status) == (Status.COMPLETED, Status.COMPLETED)
    assert [trajectory.attempt.group_id for trajectory in (first, second)] == [0, 1]


def test_the_seed_fixes_the_chance_in_the_game() -> None:
    async def dice(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await asyncio.gather(*(player.ask("ready") for player in players))
        return [rng.random(), rng.random()]

    silent = agent(lambda prompt: "yes")

    def returns(seed: int) -> list[object]:
        return [one.rewards["return"] for one in play(dice, silent, silent, seed=seed)]

    assert returns(1) == returns(1) != returns(2)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, float("nan")], [1.0, "won"], None])
def test_a_game_without_a_finite_return_per_player_fails_all_attempts(wrong: list[float]) -> None:
    async def game(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await asyncio.gather(*(player.ask("ready") for player in players))
        return wrong

    for trajectory in play(game, *[agent(lambda prompt: "yes")] * 2):
        assert trajectory.status == Status.ENVIRONMENT_FAILED and "the game failed" in str(trajectory.reason)
        assert not trajectory.rewards


def test_an_engine_failure_of_one_player_ends_the_match() -> None:
    first, second = play(nim, agent(lambda prompt: "1"), agent(lambda prompt: "1", Failing))
    assert second.status == Status.ENGINE_FAILED
    assert first.status == Status.ENVIRONMENT_FAILED and "player 1 left" in str(first.reason)


def test_a_game_may_continue_without_a_player() -> None:
    async def forgiving(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        try:
            await players[1].ask("ready")
        except PlayerDropped:
            return [1.0, 0.0]
        return [0.0, 0.0]

    first, second = play(forgiving, agent(lambda prompt: "1"), agent(lambda prompt: "1", Failing))
    assert first.rewards == {"return": 1.0} and first.status == Status.COMPLETED
    assert second.status == Status.ENGINE_FAILED


def test_a_player_out_of_tokens_is_not_trained_if_the_game_has_no_result() -> None:
    async def endless(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        while True:
            await players[0].ask("more")
            await players[1].ask("more")

    first, second = play(endless, agent(lambda prompt: "1", context=60), agent(lambda prompt: "1"))
    assert first.status == Status.REWARD_FAILED and first.reason == "the game had no result"
    assert second.status == Status.ENVIRONMENT_FAILED


def test_a_player_that_times_out_before_its_first_question_does_not_block_the_game() -> None:
    errors: list[PlayerDropped] = []

    async def slow(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        await asyncio.sleep(0.2)
        try:
            await players[1].ask("ready")
        except PlayerDropped as error:
            errors.append(error)
        return [1.0, 0.0]

    first, second = play(slow, *[agent(lambda prompt: "1")] * 2, deadlines=(None, 0.05))
    assert errors and first.rewards == {"return": 1.0} and first.status == Status.COMPLETED
    assert second.status == Status.CANCELLED and not second.turns


@pytest.mark.parametrize("raised", [asyncio.CancelledError("own"), SystemExit(3)])
def test_an_exception_of_the_game_fails_only_its_match(raised: BaseException) -> None:
    async def giving_up(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        raise raised

    for trajectory in play(giving_up, *[agent(lambda prompt: "1")] * 2):
        assert trajectory.status == Status.ENVIRONMENT_FAILED and type(raised).__name__ in str(trajectory.reason)


def test_a_cancelled_match_ends() -> None:
    async def endless(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        while True:
            await players[0].ask("more")

    contexts = [RolloutContext(AttemptId("run", "nim", player, 0), player) for player in (0, 1)]
    speaking = agent(lambda prompt: "1", context=10**6)

    async def cancelling() -> None:
        async with asyncio.timeout(0.1):
            await play_game(endless, (speaking, speaking), TASK, contexts, 0)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(cancelling(), 600))


def test_the_sample_of_a_model_client_depends_only_on_the_conversation() -> None:
    seeds: list[int] = []

    class Noting(ScriptedEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            seeds.append(params.seed)
            return await super().generate(prompt, params, session_id=session_id)

    client = chat_client(Noting(CHAT, lambda prompt: "Tea."), CHAT, SamplingParams(max_tokens=32, seed=3))
    conversations = [(Message.system("You want tea."), Message.user(text)) for text in ("What?", "What?", "Why?")]

    async def answers() -> list[Message]:
        return [await client(messages) for messages in conversations]

    assert [message.text for message in asyncio.run(answers())] == ["Tea."] * 3
    assert seeds[0] == seeds[1] != seeds[2]
