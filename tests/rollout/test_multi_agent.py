"""Several agents in one match, and a frozen policy that an environment asks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status, Trajectory
from agent_r1.envs.multi_agent import Game, Player, PlayerDropped
from agent_r1.model.load import load_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.model_client import chat_client
from agent_r1.rollout.multi_agent import play_game
from agent_r1.rollout.scripted_engine import ScriptedEngine
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
    """Whoever takes the last wins; the first player is told of the other's move."""
    pile, turn = task.data["pile"], 0
    while pile > 0:
        taken = int(await players[turn].ask(f"pile {pile}"))
        players[1 - turn].tell(f"they took {taken}")
        pile, turn = pile - taken, 1 - turn
    return [0.0, 1.0] if turn == 0 else [1.0, 0.0]


def played(
    game: Game, *agents: Agent, seed: int = 0, seconds: float = 60, given: Sequence[float | None] = (None, None)
) -> tuple[Trajectory, ...]:
    """``given`` are the seconds until each player's deadline."""

    async def playing() -> tuple[Trajectory, ...]:
        now = asyncio.get_running_loop().time()
        deadlines = [None if own is None else now + own for own in given]
        contexts = [RolloutContext(AttemptId("run", "nim", seat, 0), seat, own) for seat, own in enumerate(deadlines)]
        return await asyncio.wait_for(play_game(game, agents, TASK, contexts, seed, seconds), 10)

    return asyncio.run(playing())


def texts(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in trajectory.messages]


def test_each_side_has_a_trajectory_of_its_own_with_its_own_return() -> None:
    first, second = played(nim, agent(lambda prompt: "2"), agent(lambda prompt: "1"))
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


def test_what_the_other_says_is_no_action_of_mine() -> None:
    first, second = played(nim, agent(lambda prompt: "2"), agent(lambda prompt: "1"))
    for trajectory, own in ((first, "2"), (second, "1")):
        assert {CHAT.tokenizer.decode(turn.action_ids) for turn in trajectory.turns} == {f"{own}<|im_end|>"}
        assert all("they took" in CHAT.tokenizer.decode(turn.new_ids) for turn in trajectory.turns[1:])


def test_one_agent_may_sit_on_both_seats() -> None:
    both = agent(lambda prompt: "1")
    first, second = played(nim, both, both)
    assert (len(first.turns), len(second.turns)) == (3, 2) and first.rewards["return"] == 1.0


def test_the_seed_fixes_the_chance_of_the_game() -> None:
    async def dice(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await asyncio.gather(*(player.ask("ready") for player in players))
        return [rng.random(), rng.random()]

    silent = agent(lambda prompt: "yes")

    def returns(seed: int) -> list[object]:
        return [one.rewards["return"] for one in played(dice, silent, silent, seed=seed)]

    assert returns(1) == returns(1) != returns(2)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, float("nan")], [1.0, "won"], None])
def test_a_game_without_a_return_for_each_player_fails_all(wrong: list[float]) -> None:
    async def game(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await asyncio.gather(*(player.ask("ready") for player in players))
        return wrong

    for trajectory in played(game, *[agent(lambda prompt: "yes")] * 2):
        assert trajectory.status == Status.ENVIRONMENT_FAILED and "the game failed" in str(trajectory.reason)
        assert not trajectory.rewards


def test_a_side_whose_engine_fails_ends_the_match_and_hangs_nobody() -> None:
    first, second = played(nim, agent(lambda prompt: "1"), agent(lambda prompt: "1", Failing))
    assert second.status == Status.ENGINE_FAILED
    assert first.status == Status.ENVIRONMENT_FAILED and "player 1 left" in str(first.reason)


def test_a_game_may_go_on_without_a_player() -> None:
    async def forgiving(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        try:
            await players[1].ask("ready")
        except PlayerDropped:
            return [1.0, 0.0]
        return [0.0, 0.0]

    first, second = played(forgiving, agent(lambda prompt: "1"), agent(lambda prompt: "1", Failing))
    assert first.rewards == {"return": 1.0} and first.status == Status.COMPLETED
    assert second.status == Status.ENGINE_FAILED


def test_a_side_that_runs_out_of_tokens_is_not_trained_where_the_game_had_no_result() -> None:
    async def endless(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        while True:
            await players[0].ask("more")
            await players[1].ask("more")

    first, second = played(endless, agent(lambda prompt: "1", context=60), agent(lambda prompt: "1"))
    assert first.status == Status.REWARD_FAILED and first.reason == "the game had no result"
    assert second.status == Status.ENVIRONMENT_FAILED


def test_a_player_whose_time_is_over_before_it_is_asked_hangs_nobody() -> None:
    heard: list[PlayerDropped] = []

    async def slow(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        await asyncio.sleep(0.2)
        try:
            await players[1].ask("ready")
        except PlayerDropped as left:
            heard.append(left)
        return [1.0, 0.0]

    first, second = played(slow, *[agent(lambda prompt: "1")] * 2, given=(None, 0.05))
    assert heard and first.rewards == {"return": 1.0} and first.status == Status.COMPLETED
    assert second.status == Status.CANCELLED and not second.turns


def test_a_game_that_takes_too_long_has_no_result() -> None:
    async def stuck(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        await asyncio.Event().wait()
        return [1.0, 0.0]

    for trajectory in played(stuck, *[agent(lambda prompt: "1")] * 2, seconds=0.2):
        assert trajectory.status == Status.ENVIRONMENT_FAILED and "longer than 0.2 seconds" in str(trajectory.reason)


@pytest.mark.parametrize("raised", [asyncio.CancelledError("own"), SystemExit(3)])
def test_a_game_that_gives_up_in_any_way_fails_the_match_alone(raised: BaseException) -> None:
    async def giving_up(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        raise raised

    for trajectory in played(giving_up, *[agent(lambda prompt: "1")] * 2):
        assert trajectory.status == Status.ENVIRONMENT_FAILED and type(raised).__name__ in str(trajectory.reason)


def test_a_match_that_is_cancelled_from_outside_ends() -> None:
    async def endless(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        while True:
            await players[0].ask("more")

    contexts = [RolloutContext(AttemptId("run", "nim", seat, 0), seat) for seat in (0, 1)]
    speaking = agent(lambda prompt: "1", context=10**6)

    async def cancelling() -> None:
        async with asyncio.timeout(0.1):
            await play_game(endless, (speaking, speaking), TASK, contexts, 0)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(cancelling(), 10))


def test_a_player_whom_the_game_never_asks_has_its_return_and_nothing_to_learn_from() -> None:
    async def alone(players: Sequence[Player], task: Task, rng: random.Random) -> list[float]:
        await players[0].ask("ready")
        return [1.0, 0.5]

    first, second = played(alone, *[agent(lambda prompt: "1")] * 2)
    assert (first.rewards, second.rewards) == ({"return": 1.0}, {"return": 0.5})
    assert (second.status, second.reason, second.turns) == (Status.COMPLETED, None, ())


def test_a_frozen_policy_is_asked_with_a_draw_that_the_conversation_fixes() -> None:
    seeds: list[int] = []

    class Noting(ScriptedEngine):
        async def generate(
            self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None
        ) -> Completion:
            seeds.append(params.seed)
            return await super().generate(prompt, params, session_id=session_id)

    ask = chat_client(Noting(CHAT, lambda prompt: "Tea."), CHAT, SamplingParams(max_tokens=32, seed=3))
    said = [(Message.system("You want tea."), Message.user(text)) for text in ("What?", "What?", "Why?")]

    async def answers() -> list[Message]:
        return [await ask(messages) for messages in said]

    assert [message.text for message in asyncio.run(answers())] == ["Tea."] * 3
    assert seeds[0] == seeds[1] != seeds[2]
