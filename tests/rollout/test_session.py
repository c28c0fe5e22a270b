"""Session: tokens of continued turns and new branches, and failures as values."""

import asyncio
from dataclasses import replace

import pytest
from tests_tokenizer import hermes_tokenizer

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import EngineError, UnsupportedChat
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status, Trajectory
from agent_r1.envs.user_env import ModelUser, UserEnv
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.rollout.session import Session, Stopped

ATTEMPT = AttemptId("run", "t", 0, 0)
QUESTION = (Message.user("Who rules Alba?"),)


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(hermes_tokenizer())


def open_session(renderer, reply=lambda prompt: "Bruno.", engine=ScriptedEngine, max_tokens=40, context_length=2000):
    return Session(
        engine(renderer, reply), renderer, SamplingParams(max_tokens=max_tokens), context_length, ATTEMPT, seed=5
    )


def answer(session, *conversations):
    """Return the last response to the conversations, one after the other."""

    async def respond():
        return [await session.respond(messages) for messages in conversations]

    return asyncio.run(respond())[-1]


def test_a_known_beginning_is_continued_with_the_sampled_tokens(renderer):
    session = open_session(renderer)
    first = answer(session, QUESTION)
    second = (*QUESTION, first.message, Message.user("Since when?"))
    answer(session, second)
    session.observe(Transition((), end="terminal"))
    trajectory = session.trajectory("t", Status.COMPLETED)
    one, two = trajectory.turns
    assert (one.parent, two.parent) == (None, 0)
    assert trajectory.prompt_ids(two) == one.new_ids + one.action_ids + two.new_ids
    assert trajectory.prompt_ids(two) == renderer.render(second).token_ids
    assert len(two.logprobs) == len(two.action_ids)


def test_the_longest_known_beginning_is_continued_also_if_it_is_not_the_latest(renderer):
    session = open_session(renderer)
    reply = answer(session, QUESTION).message
    long = (*QUESTION, reply, Message.user("Since when?"))
    forked = (*QUESTION, reply, Message.user("And Bru?"))
    answer(session, long, forked, (*long, reply, Message.user("Why?")))
    session.observe(Transition(()))
    assert [turn.parent for turn in session.turns] == [None, 0, 0, 1]
    trajectory = session.trajectory("t", Status.COMPLETED)
    for turn in trajectory.turns:
        text = renderer.tokenizer.decode(list(trajectory.prompt_ids(turn)))
        assert ("And Bru?" in text) == (turn.index == 2)


def test_a_turn_without_an_observed_outcome_is_not_part_of_the_trajectory(renderer):
    session = open_session(renderer)
    assert isinstance(answer(session, QUESTION), Action)
    trajectory = session.trajectory("t", Status.ENVIRONMENT_FAILED, reason="lost")
    assert trajectory.turns == () and trajectory.reason == "lost" and not trajectory.truncated
    session.observe(Transition((), rewards={"found": 1.0}))
    (turn,) = session.trajectory("t", Status.OUT_OF_TURNS).turns
    assert turn.rewards == {"found": 1.0} and session.trajectory("t", Status.OUT_OF_TURNS).truncated
    with pytest.raises(RuntimeError, match="no action"):
        session.observe(Transition(()))


class Dead(ScriptedEngine):
    async def generate(self, prompt, params, *, session_id=None):
        raise EngineError("gone")


class Cancelling(ScriptedEngine):
    async def generate(self, prompt, params, *, session_id=None):
        completion = await super().generate(prompt, params, session_id=session_id)
        return replace(completion, finish_reason="cancelled")


class Strict(TemplateRenderer):
    """Refuses every conversation."""

    def render(self, messages, tools=()):
        raise UnsupportedChat("roles must alternate")


def test_failures_are_values(renderer):
    failed = answer(open_session(renderer, engine=Dead), QUESTION)
    assert failed.status is Status.ENGINE_FAILED and failed.reason.startswith("EngineError: gone")
    assert answer(open_session(renderer, engine=Cancelling), QUESTION).status is Status.CANCELLED
    assert answer(open_session(renderer, context_length=3), QUESTION) == Stopped(Status.OUT_OF_TOKENS)
    refused = answer(open_session(Strict(hermes_tokenizer())), QUESTION)
    assert refused.status is Status.ENVIRONMENT_FAILED and "roles must alternate" in refused.reason


def test_each_turn_has_its_own_seed_and_the_room_that_is_left(renderer):
    given = []

    class Noting(ScriptedEngine):
        async def generate(self, prompt, params, *, session_id=None):
            given.append((len(prompt.token_ids), params, session_id))
            return await super().generate(prompt, params, session_id=session_id)

    length = len(renderer.render(QUESTION).token_ids)
    session = open_session(renderer, engine=Noting, max_tokens=40, context_length=length + 30)
    answer(session, QUESTION, QUESTION)
    assert [params.max_tokens for _, params, _ in given] == [30, 30]
    assert [params.seed for _, params, _ in given] == [ATTEMPT.seed(5, 0), ATTEMPT.seed(5, 1)]
    assert {id for *_, id in given} == {str(ATTEMPT)}
    assert all(params.stop_token_ids == renderer.stop_token_ids for _, params, _ in given)


class AskingEnv:
    """Asks a model of its context for the first message."""

    tools = ()

    def __init__(self, role):
        self.role = role

    async def open(self, task, context):
        self.start = (await context.models[self.role]((Message.user("What do you want?"),)),)
        return self

    async def step(self, action):
        return Transition((), end="terminal")

    async def close(self):
        return None


async def wants_tea(messages):
    return Message.user("Tea.") if messages[-1].text == "What do you want?" else Message.user("DONE")


def test_an_environment_can_query_the_models_of_its_context(renderer):
    agent = Agent(ScriptedEngine(renderer, lambda prompt: "Here."), renderer, SamplingParams(max_tokens=40), 2000)
    task = Task("t", "unused")

    def opening(role, **models):
        context = RolloutContext(ATTEMPT, 0, models=models)
        (trajectory,) = asyncio.run(AgentLoop(agent, AskingEnv(role)).run(task, context))
        return trajectory

    assert [message.text for message in opening("user", user=wants_tea).messages] == ["Tea.", "Here."]
    assert [message.text for message in opening("policy").messages] == ["Here.", "Here."]
    missing = opening("judge")
    assert missing.status is Status.ENVIRONMENT_FAILED and "KeyError: 'judge'" in missing.reason


def first_attempt(collector, task):
    async def run():
        (group,) = [group async for group in collector.collect([GroupRequest(0, task, 1)])]
        return group.trajectories[0]

    return asyncio.run(run())


def test_a_simulated_user_is_the_collectors_user_model(renderer):
    personas = []

    async def user(messages):
        personas.append(messages[0].text)
        return Message.assistant("DONE")

    env = UserEnv([], ModelUser(lambda task: "You want tea.", "DONE"))
    agent = Agent(ScriptedEngine(renderer, lambda prompt: "Here."), renderer, SamplingParams(max_tokens=40), 2000)
    limits = RolloutLimits(retries=0)
    served = Collector(AgentLoop(agent, env), (), NullRecorder(), "test", limits, models={"user": user})
    assert first_attempt(served, Task("t", "Tea?")).status is Status.COMPLETED and personas == ["You want tea."]
    alone = first_attempt(Collector(AgentLoop(agent, env), (), NullRecorder(), "test", limits), Task("t", "Tea?"))
    assert alone.status is Status.ENVIRONMENT_FAILED and 'models["user"]' in alone.reason


class OwnRollout:
    """A user's own harness: two participants, of which the second one is the attempt."""

    async def run(self, task, context):
        if task.id == "broken":
            raise ValueError("no harness")
        other = replace(context.id, run="opponent")
        return [Trajectory(id, task.id, (), Status.COMPLETED) for id in (other, context.id)]


def test_the_collector_drives_any_rollout_and_survives_its_exceptions():
    collector = Collector(OwnRollout(), (), NullRecorder(), "test", RolloutLimits(retries=0))
    assert first_attempt(collector, Task("t", "")).attempt == AttemptId("test", "t", 0, 0)
    broken = first_attempt(collector, Task("broken", ""))
    assert broken.status is Status.ENVIRONMENT_FAILED
    assert broken.reason.startswith("the rollout failed: ValueError: no harness")
