"""Continuations of attempts: they repeat the tokens before a turn exactly, and their mean return is its value."""

import asyncio
import random
from itertools import count

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Status
from agent_r1.data.batch import select_trainable
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import FIRST_CONTINUATION, Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.replay import Continuations
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tools.function_tool import tool

CALL = '<tool_call>\n{"name": "roll", "arguments": {}}\n</tool_call>'
TASK = Task("dice", (Message.user("Roll twice, then answer."),))


@tool
def roll(context: RolloutContext) -> str:
    """Roll a die. The result depends on the seed of the attempt."""
    return f"rolled {random.Random(context.seed).randint(1, 10**9)}"


TICKS = count()


@tool(name="roll")
def tick() -> str:
    """Return another number at each call."""
    return f"rolled {next(TICKS)}"


def last_number(trajectory, task):
    return float(trajectory.last_text.split()[-1])


def collect(die, continuations=2, score=last_number):
    """Return a group of two attempts that call twice and answer, and the texts that the engine was asked for."""
    renderer, asked = TemplateRenderer(hermes_tokenizer()), []

    def reply(prompt):
        asked.append(prompt)
        return CALL if prompt.count("rolled") < 2 else f"answer {len(asked)}"

    agent = Agent(ScriptedEngine(renderer, reply), renderer, SamplingParams(max_tokens=200), 9999, seed=7)
    env = ToolEnv([die])
    scorer = FunctionScorer({"score": score})
    made = Continuations(agent, env, continuations) if continuations else None
    collector = Collector(
        AgentLoop(agent, env), (scorer,), NullRecorder(), "run", RolloutLimits(), seed=7, continuations=made
    )

    async def only():
        (group,) = [group async for group in collector.collect([GroupRequest(0, TASK, 2)])]
        return group

    return asyncio.run(only()), asked


def tokens(turn):
    return turn.new_ids, turn.action_ids, turn.observation


def test_a_continuation_repeats_the_turns_before_its_own_without_asking_the_engine():
    group, asked = collect(roll)
    assert [one.status for one in group.trajectories] == [Status.COMPLETED] * 2
    assert [(one.attempt.sample_index, one.turn) for one in group.continuations] == [
        (index, turn) for index in (0, 1) for turn in (1, 2) for _ in range(2)
    ]
    by_attempt = {one.attempt: one for one in group.trajectories}
    for one in group.continuations:
        original, again = by_attempt[one.attempt], one.trajectory
        assert again.attempt.sample_index >= FIRST_CONTINUATION and again.status is Status.COMPLETED
        assert list(map(tokens, again.turns[: one.turn])) == list(map(tokens, original.turns[: one.turn]))
        assert again.turns[one.turn].new_ids == original.turns[one.turn].new_ids
    assert len(asked) == 2 * 3 + 2 * (2 * 2 + 2 * 1)  # the attempts, and the turns that continuations sample


def test_the_value_of_a_turn_is_the_mean_return_of_its_continuations():
    group, _ = collect(roll)
    samples = select_trainable([group], {"score": 2.0}).samples
    for sample in samples:
        own = [one for one in group.continuations if one.attempt == sample.trajectory.attempt]
        for turn in (1, 2):
            rewards = [one.trajectory.rewards["score"] for one in own if one.turn == turn]
            assert sample.turn_values[turn] == pytest.approx(2.0 * sum(rewards) / 2)


def test_an_attempt_that_cannot_be_replayed_is_left_out_with_the_reason():
    group, _ = collect(tick)
    assert [one.status for one in group.trajectories] == [Status.REWARD_FAILED] * 2
    for one in group.trajectories:
        assert one.reason.startswith("turn 1 could not be valued")
        assert one.reason.endswith("the environment cannot be replayed: turn 1 has another prompt than before")


def test_without_continuations_an_environment_may_differ_at_each_call():
    group, asked = collect(tick, continuations=0)
    assert [one.status for one in group.trajectories] == [Status.COMPLETED] * 2
    assert group.continuations == () and len(asked) == 6


def test_an_attempt_whose_continuations_cannot_be_scored_is_left_out_with_the_reason():
    def score(trajectory, task):
        return None if trajectory.attempt.sample_index >= FIRST_CONTINUATION else 1.0

    group, _ = collect(roll, score=score)
    assert [one.status for one in group.trajectories] == [Status.REWARD_FAILED] * 2
    assert all(one.reason.startswith("turn 1 could not be valued") for one in group.trajectories)
