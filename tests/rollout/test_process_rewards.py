"""Process rewards of a trajectory: per turn and per call, with the token at which each call ends."""

import asyncio

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tools.function_tool import tool

CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
TEXT = f"é {CALL % 'look'}\nand {CALL % 'see'} done"
TASK = Task("t", (Message.user("hello"),))


@tool
def look() -> str:
    """Look."""
    return "seen"


def found(call, result):
    return {"found": float(result.ok)}


def words(action, results):
    return {"words": float(len(action.text.split()))}


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def agent_of(renderer, max_tokens=400):
    """Return an agent that makes two calls in its first turn and then answers."""
    engine = ScriptedEngine(renderer, lambda prompt: "<answer>so</answer>" if "tool_response" in prompt else TEXT)
    return Agent(engine, renderer, SamplingParams(max_tokens=max_tokens), 4000)


def run_episode(renderer, env, **options):
    return asyncio.run(
        AgentLoop(agent_of(renderer, **options), env).run(TASK, RolloutContext(AttemptId("run", "t", 0, 0), 0))
    )[0]


def test_each_call_has_its_rewards_and_its_last_token(renderer):
    trajectory = run_episode(renderer, ToolEnv([look], call_rewards=found, turn_rewards=words))
    called, answered = trajectory.turns
    assert called.call_rewards == ({"found": 1.0}, {"found": 0.0})
    assert called.rewards == {"words": float(len(TEXT.split()))}
    texts = [renderer.tokenizer.decode(list(called.action_ids[: end + 1])) for end in called.call_ends]
    assert [text[-len("</tool_call>") :] for text in texts] == ["</tool_call>"] * 2
    assert [text.count("</tool_call>") for text in texts] == [1, 2]
    assert (answered.call_rewards, answered.call_ends) == ((), ())


def test_the_reward_of_a_truncated_call_is_at_the_last_token(renderer):
    called = run_episode(renderer, ToolEnv([look], call_rewards=found), max_tokens=30).turns[0]
    assert called.finish_reason == "length" and called.call_rewards == ({"found": 0.0},)
    assert called.call_ends == (len(called.action_ids) - 1,)


def test_call_ends_are_recorded_also_without_call_rewards(renderer):
    called = run_episode(renderer, ToolEnv([look])).turns[0]
    assert called.call_rewards == () and len(called.call_ends) == 2


def test_a_call_reward_that_raises_fails_the_episode(renderer):
    trajectory = run_episode(renderer, ToolEnv([look], call_rewards=lambda call, result: {"found": 1 / result.ok}))
    assert trajectory.status is Status.ENVIRONMENT_FAILED and "ZeroDivisionError" in trajectory.reason


def scored(renderer, env, scorers=()):
    """Return one attempt from a collector."""

    async def run():
        collector = Collector(AgentLoop(agent_of(renderer), env), scorers, NullRecorder(), "test", RolloutLimits())
        (group,) = [group async for group in collector.collect([GroupRequest(0, TASK, 1)])]
        return group.trajectories[0]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("turn", "call", "whole"), [("same", "same", "em"), ("turn", "same", "same"), ("same", "call", "same")]
)
def test_a_reward_name_at_two_levels_fails_the_attempt(renderer, turn, call, whole):
    env = ToolEnv(
        [look], call_rewards=lambda one, result: {call: 1.0}, turn_rewards=lambda action, results: {turn: 1.0}
    )
    trajectory = scored(renderer, env, (FunctionScorer({whole: lambda trajectory, task: 1.0}),))
    assert trajectory.status is Status.REWARD_FAILED and not trajectory.rewards
    assert (
        trajectory.reason == "reward same is given at two levels: use different names for calls, turns and trajectories"
    )
