"""How an episode of a user's agent ends, and that its turns are those of the agent loop."""

import asyncio
import json
import os
import runpy
import threading
import time
from pathlib import Path

import openai
import pytest
import torch
from agent_episodes import ANSWER, QUESTION, TOOLS, RecordingEngine

from agent_r1.core.environment import RolloutContext
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import SamplingParams
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Status
from agent_r1.gateway import agent_program as agent_threads
from agent_r1.gateway.agent_program import AgentHost, AgentProgram
from agent_r1.gateway.config import GatewayConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.renderers.formats.detect import open_renderer
from agent_r1.rollout.agent_loop import Agent, AgentLoop
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki.wiki import search

ROOT = Path(__file__).parents[2]
BODY = {"model": "any", "messages": [QUESTION]}


def answer(prompt):
    return ANSWER


def client_of(base_url, api_key, **options):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)


def ask(base_url, api_key, **options):
    return client_of(base_url, api_key).chat.completions.create(**{**BODY, **options}).choices[0].message.content


@pytest.mark.parametrize(
    ("returned", "expected"), [(None, None), ("Bruno", "Bruno"), (42, "42"), ({"answer": "Bruno"}, None)]
)
def test_the_returned_value_is_the_answer(episodes, returned, expected):
    def run(base_url, api_key, task):
        ask(base_url, api_key)
        return returned

    trajectory = episodes.play(run, answer)
    assert trajectory.answer == expected and trajectory.last_text == ANSWER
    if isinstance(returned, dict):
        assert trajectory.status is Status.ENVIRONMENT_FAILED and "object of type dict" in trajectory.reason
    else:
        assert trajectory.status is Status.COMPLETED


def test_each_conversation_of_an_agent_is_recorded_with_its_messages_and_tools(episodes):
    helper = {"role": "user", "content": "Which lake?"}

    def run(base_url, api_key, task):
        ask(base_url, api_key, messages=[helper])
        ask(base_url, api_key, tools=TOOLS)
        messages = [QUESTION, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Sure?"}]
        ask(base_url, api_key, messages=messages, tools=TOOLS)

    trajectory = episodes.play(run, answer)
    aside, question = trajectory.branches
    assert [message.text for message in aside.messages] == ["Which lake?", ANSWER] and aside.tools == ()
    assert [message.text for message in question.messages] == [QUESTION["content"], ANSWER, "Sure?", ANSWER]
    assert [tool.name for tool in question.tools] == ["search"]
    assert [turn.index for turn in question.turns] == [1, 2]


async def raising(base_url, api_key, task):
    ask(base_url, api_key)
    raise ValueError("no such page")


def exiting(base_url, api_key, task):
    raise SystemExit(3)


async def exiting_in_a_task(base_url, api_key, task):
    async def leave():
        raise SystemExit(3)

    await asyncio.create_task(leave())


def silent(base_url, api_key, task):
    return "Bruno"


def test_the_example_answers_a_bad_call_with_its_error(episodes):
    example = runpy.run_path(str(ROOT / "examples" / "own_agent.py"))["run"]
    call = '<tool_call>\n{"name": "search", "arguments": {"question": "Alba"}}\n</tool_call>'
    trajectory = episodes.play(example, lambda prompt: ANSWER if "error: " in prompt else call)
    assert trajectory.status is Status.COMPLETED and trajectory.answer == ANSWER, trajectory.reason
    assert "unexpected keyword argument 'question'" in trajectory.messages[-2].text


async def refused(base_url, api_key, task):
    ask(base_url, api_key, response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raising, "the agent raised ValueError: no such page (test_agent_program.py:"),
        (exiting, "the agent raised SystemExit: 3"),
        (exiting_in_a_task, "the agent raised SystemExit: 3"),
        (silent, "the agent ended without an answer of the policy"),
        (refused, "the agent raised BadRequestError: Error code: 400"),
    ],
)
def test_a_failing_agent_has_a_reason(episodes, function, reason):
    trajectory = episodes.play(function, answer)
    assert trajectory.status is Status.ENVIRONMENT_FAILED and trajectory.reason.startswith(reason), trajectory.reason


def test_an_exception_that_the_policy_caused_can_be_trained(episodes):
    trains = GatewayConfig(on_error="train")
    trajectory = episodes.play(raising, answer, config=trains)
    assert trajectory.status is Status.COMPLETED and "ValueError: no such page" in trajectory.reason
    assert trajectory.answer == "" and trajectory.last_text == ANSWER and len(trajectory.turns) == 1
    for function in (exiting, refused):  # the policy gave no answer, so it is not the cause
        trajectory = episodes.play(function, answer, config=trains)
        assert trajectory.status is Status.ENVIRONMENT_FAILED and trajectory.reason.startswith("the agent raised")


def raising_after_own_limit(base_url, api_key, task):
    ask(base_url, api_key, max_tokens=2)
    raise ValueError("the answer is cut")


def raising_later(base_url, api_key, task):
    ask(base_url, api_key, max_tokens=2)
    ask(base_url, api_key)
    raise ValueError("no such page")


@pytest.mark.parametrize(
    ("function", "max_tokens", "status"),
    [
        (raising, 3, Status.OUT_OF_TOKENS),
        (raising_after_own_limit, 400, Status.OUT_OF_TOKENS),
        (raising_later, 400, Status.ENVIRONMENT_FAILED),
    ],
)
def test_an_agent_that_raises_after_a_cut_answer_is_out_of_tokens(episodes, function, max_tokens, status):
    trajectory = episodes.play(function, answer, max_tokens=max_tokens)
    assert trajectory.status is status and trajectory.reason.startswith("the agent raised ValueError: ")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_hanging_agent_ends_at_its_deadline_and_its_key_with_it(episodes, is_async):
    may_end, late = threading.Event(), []

    def call_late(base_url, api_key):
        may_end.wait(60)
        try:
            ask(base_url, api_key)
        except openai.OpenAIError as error:
            late.append(error)

    def hanging(base_url, api_key, task):
        call_late(base_url, api_key)

    async def hanging_async(base_url, api_key, task):
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.to_thread(call_late, base_url, api_key)

    trajectory = episodes.play(hanging_async if is_async else hanging, answer, seconds=0.2)
    may_end.set()
    assert (
        trajectory.status is Status.CANCELLED
        and trajectory.reason == "the agent ran past its deadline (episode_seconds)"
    )
    end = time.monotonic() + 60
    while not late and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(late[0], openai.AuthenticationError | openai.APIConnectionError)


def test_a_key_ends_with_its_episode(renderer):
    accesses = []

    def run(base_url, api_key, task):
        accesses.append((base_url, api_key))
        ask(base_url, api_key)

    async def main():
        agent = Agent(RecordingEngine(renderer, answer), renderer, SamplingParams(max_tokens=40), 4000)
        program = AgentProgram(run, agent, AgentHost())
        for index in range(2):
            context = RolloutContext(AttemptId("run", "t", 0, index), 0)
            (trajectory,) = await program.run(Task("t", "Who rules Alba?"), context)
            with pytest.raises(openai.AuthenticationError):
                await asyncio.to_thread(ask, *accesses[index])
            assert len(trajectory.turns) == 1
        await program.host.close()

    asyncio.run(main())


def test_an_agent_that_blocks_the_event_loop_of_all_agents_does_not_block_later_episodes(renderer, monkeypatch, caplog):
    monkeypatch.setattr(agent_threads, "RESPONSE_SECONDS", 0.05)
    may_end = threading.Event()

    async def run(base_url, api_key, task):
        if task.id == "blocking":
            may_end.wait(600)
        return ask(base_url, api_key)

    async def main():
        agent = Agent(RecordingEngine(renderer, answer), renderer, SamplingParams(max_tokens=40), 4000)
        program, loop = AgentProgram(run, agent, AgentHost()), asyncio.get_running_loop()
        context = RolloutContext(AttemptId("run", "blocking", 0, 0), 0, loop.time() + 0.2)
        (blocking,) = await program.run(Task("blocking", "Who?"), context)
        while "blocks the event loop" not in caplog.text:
            await asyncio.sleep(0.01)
        context = RolloutContext(AttemptId("run", "t", 0, 1), 0, loop.time() + 60)
        (later,) = await program.run(Task("t", "Who?"), context)
        await program.host.close()
        return blocking.status, later.status

    try:
        assert asyncio.run(main()) == (Status.CANCELLED, Status.COMPLETED)
    finally:
        may_end.set()


async def loop_of_the_program(base_url, key, task):
    asyncio.get_running_loop().create_task(asyncio.sleep(1000))  # a task that the program abandons
    return asyncio.get_running_loop()


def test_the_event_loop_of_agents_is_closed_with_their_threads():
    async def call_and_close():
        threads = agent_threads.AgentThreads()
        loop = await threads.call(loop_of_the_program, "http://127.0.0.1:1/v1", "key", Task("a", "Who?"))
        assert loop.is_running()
        threads.close()
        async with asyncio.timeout(300):
            while not loop.is_closed():
                await asyncio.sleep(0.01)

    asyncio.run(call_and_close())


def test_an_async_agent_that_blocks_its_event_loop_is_served(episodes):
    async def run(base_url, api_key, task):
        return ask(base_url, api_key)  # a synchronous client

    assert episodes.play(run, answer).answer == ANSWER


class FailingEngine(RecordingEngine):
    """Fails in each generation after the first."""

    async def generate(self, prompt, params, *, session_id=None):
        if self.generations:
            raise EngineError("gone")
        return await super().generate(prompt, params, session_id=session_id)


def catching(base_url, api_key, task):
    """Ask until a request fails, and return without a sign of the failure."""
    for _ in range(4):
        try:
            ask(base_url, api_key)
        except openai.OpenAIError:
            break
    return "I could not."


def growing(base_url, api_key, task):
    for count in range(1, 9):
        ask(base_url, api_key, messages=[QUESTION] * count * 20)


LIMITS = {"config": GatewayConfig(max_turns=2)}


@pytest.mark.parametrize(
    ("function", "options", "status"),
    [
        (catching, {"engine": FailingEngine}, Status.ENGINE_FAILED),
        (catching, LIMITS, Status.OUT_OF_TURNS),
        (growing, {"context": 1500}, Status.OUT_OF_TOKENS),
        (lambda *access: ask(*access[:2]), {"max_tokens": 3}, Status.OUT_OF_TOKENS),
    ],
)
def test_a_limit_or_a_failed_engine_is_the_status(episodes, function, options, status):
    trajectory = episodes.play(function, answer, **options)
    assert trajectory.status is status, trajectory.reason
    assert trajectory.truncated == (status is not Status.ENGINE_FAILED) and trajectory.turns


def test_a_limit_that_the_agent_set_does_not_truncate_its_episode(episodes):
    trajectory = episodes.play(lambda *access: ask(*access[:2], max_tokens=1), answer)
    assert trajectory.status is Status.COMPLETED and not trajectory.truncated


def test_a_text_far_above_the_context_is_refused_before_it_is_tokenized(episodes, monkeypatch):
    def run(base_url, api_key, task):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(base_url, api_key, messages=[{"role": "user", "content": "x" * 200_000}])
        assert refused.value.code == "context_length_exceeded"

    def render(messages, tools):
        raise AssertionError("the text was rendered")

    monkeypatch.setattr(episodes.renderer, "render", render)
    assert episodes.play(run, answer, context=1500).status is Status.OUT_OF_TOKENS


def test_the_turn_limit_is_an_error_that_is_not_repeated(episodes):
    def run(base_url, api_key, task):
        ask(base_url, api_key)
        ask(base_url, api_key)

    trajectory = episodes.play(run, answer, config=GatewayConfig(max_turns=1))
    assert trajectory.status is Status.OUT_OF_TURNS and "Error code: 403" in trajectory.reason


def test_an_agent_reaches_the_gateway_although_a_proxy_is_set(episodes, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    trajectory = episodes.play(ask_and_read_environment, answer)
    assert trajectory.answer == "intranet.example,127.0.0.1,localhost", trajectory.reason


def ask_and_read_environment(base_url, api_key, task):
    ask(base_url, api_key)
    return os.environ["no_proxy"]


def test_a_limit_that_the_agent_survives_is_no_failure(episodes):
    def run(base_url, api_key, task):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(base_url, api_key, messages=[QUESTION] * 500)
        assert refused.value.code == "context_length_exceeded"
        return ask(base_url, api_key)

    assert episodes.play(run, answer, context=1500).status is Status.COMPLETED


class SlowPlans(RecordingEngine):
    """Answers the planner after another answer."""

    async def generate(self, prompt, params, *, session_id=None):
        while "Plan." in self._renderer.decode(prompt.token_ids) and not self.generations:
            await asyncio.sleep(0.01)
        return await super().generate(prompt, params, session_id=session_id)


def test_the_conversation_that_was_requested_first_is_the_start(episodes):
    async def run(base_url, api_key, task):
        async def ask(text):
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            planning = asyncio.create_task(ask("Plan."))
            while not episodes.log().num_in_progress:
                await asyncio.sleep(0.01)
            await ask("Is it spam?")
            await planning

    trajectory = episodes.play(run, answer, engine=SlowPlans)
    assert len(trajectory.turns) == 2 and trajectory.start[0].text == "Plan.", trajectory.reason


# ---- the same turns as the agent loop


async def tool_loop(base_url, api_key, task):
    """The agent loop of TinyWiki, as an agent over HTTP."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": message.role, "content": message.text} for message in task.messages]
    tools = [search.spec.to_openai()]
    for _ in range(5):
        reply = (await client.chat.completions.create(model="any", messages=messages, tools=tools)).choices[0].message
        if not reply.tool_calls:
            return
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            result = await search.run(json.loads(call.function.arguments), task, None)
            text = "".join(part.text for part in result.parts)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def exact(trajectory):
    """All that training reads of a turn."""
    return [
        (
            turn.parent,
            turn.new_ids,
            turn.action_ids,
            turn.logprobs,
            turn.version_spans,
            turn.finish_reason,
            turn.call_ends,
        )
        for turn in trajectory.turns
    ]


def test_the_agent_loop_over_http_samples_the_same_tokens():
    taskset, renderer = build("tinywiki", None, None, 0, None), open_renderer(load_tokenizer("tiny-base"))
    tasks = taskset.tasks("train")[:4]

    async def play(over_http):
        engine = TorchEngine(load_model("tiny-base", torch.float32), 512)
        agent, host = Agent(engine, renderer, SamplingParams(max_tokens=32), 512, seed=11), AgentHost()
        rollout = AgentProgram(tool_loop, agent, host) if over_http else AgentLoop(agent, taskset.env)
        try:
            contexts = [RolloutContext(AttemptId("run", task.id, 0, index), 0) for index, task in enumerate(tasks)]
            both = await asyncio.gather(*(rollout.run(task, own) for task, own in zip(tasks, contexts, strict=True)))
            return [trajectory for (trajectory,) in both]
        finally:
            await host.close()
            await engine.close()

    by_loop, by_http = asyncio.run(play(False)), asyncio.run(play(True))
    valid = 0
    for one, other in zip(by_loop, by_http, strict=True):
        if any(call.error for turn in one.turns for call in turn.action.message.calls):
            continue  # the loop explains a malformed call, which a client receives as text
        valid += 1
        turns = len(other.turns)
        assert exact(one)[:turns] == exact(other) and one.start == other.start
        assert [turn.observation for turn in one.turns] == [turn.observation for turn in other.turns]
        assert one.messages == other.messages
    assert valid >= 2 and any(len(trajectory.turns) > 1 for trajectory in by_http)
