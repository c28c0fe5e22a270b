"""Repeated requests get the answer of the first try, so that an attempt has no duplicate turns."""

import asyncio
import gc
import threading

import httpx
import openai
import pytest
from agent_episodes import ANSWER, QUESTION, RecordingEngine, wait_until

from agent_r1.core.messages import Message
from agent_r1.gateway import coalescing
from agent_r1.gateway.chat import ChatAnswer, ChatRequest, Draft, RequestError
from agent_r1.gateway.coalescing import AnswerLog
from agent_r1.gateway.config import GatewayConfig

BODY = {"model": "any", "messages": [QUESTION]}


class WaitingEngine(RecordingEngine):
    """Waits with its answers until ``may_answer`` is set."""

    def __init__(self, renderer, reply):
        super().__init__(renderer, reply)
        self.may_answer, self.num_started = threading.Event(), 0

    async def generate(self, prompt, params, *, session_id=None):
        self.num_started += 1
        while not self.may_answer.is_set():
            await asyncio.sleep(0.005)
        return await super().generate(prompt, params, session_id=session_id)


def answer(prompt):
    return ANSWER


def poster(base_url, api_key):
    """Return a function that posts BODY and returns the response."""

    def post(**headers):
        headers = {"Authorization": f"Bearer {api_key}", **headers}
        return httpx.post(f"{base_url}/chat/completions", json=BODY, headers=headers, timeout=60, trust_env=False)

    return post


async def abandon(client, engine):
    """Post BODY, and close the connection when the engine has started."""
    asking = asyncio.create_task(client.chat.completions.create(**BODY))
    while not engine.num_started:
        await asyncio.sleep(0.01)
    asking.cancel()


def test_the_retry_of_a_client_that_timed_out_joins_the_first_try(episodes):
    def run(base_url, api_key, task):
        engine = episodes.engine
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=20, timeout=0.5)
        asking = threading.Thread(target=lambda: answers.append(client.chat.completions.create(**BODY)))
        asking.start()
        wait_until(lambda: engine.num_started)
        wait_until(episodes.is_abandoned)  # the client has closed its connection
        engine.may_answer.set()
        asking.join()

    answers = []
    trajectory = episodes.play(run, answer, engine=WaitingEngine)
    assert len(trajectory.turns) == len(answers) == episodes.engine.num_started == 1, trajectory.reason


def test_an_abandoned_request_is_resumed_by_an_equal_one(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await abandon(client, episodes.engine)
        while not episodes.is_abandoned():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(client.chat.completions.create(**BODY))
        episodes.engine.may_answer.set()
        return (await second).choices[0].message.content

    trajectory = episodes.play(run, answer, engine=WaitingEngine)
    assert trajectory.answer == ANSWER and len(trajectory.turns) == episodes.engine.num_started == 1


def test_an_answer_that_nobody_received_is_no_turn(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await abandon(client, episodes.engine)
        while not episodes.is_abandoned():
            await asyncio.sleep(0.01)
        episodes.engine.may_answer.set()
        await client.chat.completions.create(model="any", messages=[QUESTION, QUESTION])

    trajectory = episodes.play(run, answer, engine=WaitingEngine)
    assert len(trajectory.turns) == 1 and len(trajectory.start) == 2


def test_an_abandoned_request_ends_soon_and_counts_as_an_answer(episodes, monkeypatch):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        await abandon(client, episodes.engine)
        while episodes.log().num_in_progress:
            await asyncio.sleep(0.01)
        episodes.engine.may_answer.set()
        await client.chat.completions.create(**BODY)
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(**BODY)

    monkeypatch.setattr(coalescing, "ABANDONED_SECONDS", 0.01)
    trajectory = episodes.play(run, answer, engine=WaitingEngine, config=GatewayConfig(max_turns=2))
    assert episodes.engine.num_started == 2 and len(trajectory.turns) == 1, trajectory.reason


def test_alternatives_count_one_by_one_as_answers_at_the_same_time(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        asking = asyncio.create_task(client.chat.completions.create(**BODY, n=3))
        while not episodes.engine.num_started:
            await asyncio.sleep(0.01)
        assert episodes.engine.num_started == 1
        episodes.engine.may_answer.set()
        await asking

    trajectory = episodes.play(run, answer, engine=WaitingEngine, config=GatewayConfig(max_concurrent=1))
    assert len(trajectory.turns) == 3, trajectory.reason


def test_equal_requests_in_parallel_are_sampled_separately(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        asking = [asyncio.create_task(client.chat.completions.create(**BODY)) for _ in range(3)]
        while episodes.engine.num_started < 3:
            await asyncio.sleep(0.01)
        episodes.engine.may_answer.set()
        await asyncio.gather(*asking)

    trajectory = episodes.play(run, answer, engine=WaitingEngine)
    assert len(trajectory.turns) == 3, trajectory.reason


RETRY, SECOND_RETRY = {"X-Stainless-Retry-Count": "1"}, {"X-Stainless-Retry-Count": "2"}


@pytest.mark.parametrize(
    ("requests", "num_turns"),
    [
        ([{}, {}], 2),
        ([{}, RETRY, SECOND_RETRY], 1),
        ([{}, {}, RETRY, RETRY], 2),  # each of two answers is repeated once
        ([{}, RETRY, RETRY], 2),
    ],
)
def test_the_headers_of_a_retry_repeat_a_delivered_answer(episodes, requests, num_turns):
    def run(base_url, api_key, task):
        post = poster(base_url, api_key)
        assert len({post(**headers).json()["id"] for headers in requests}) == num_turns

    trajectory = episodes.play(run, answer)
    assert len(trajectory.turns) == num_turns, trajectory.reason


REQUEST = ChatRequest((Message.user("Who rules Alba?"),))


class FailingModel:
    """Fails ``num_failures`` times, also if it is cancelled, and then answers."""

    name, max_concurrent = "failing", 4

    def __init__(self, num_failures):
        self.num_failures, self.num_started = num_failures, 0

    async def draft(self, request, live):
        self.num_started += 1
        try:
            await asyncio.sleep(0)
        finally:
            if self.num_started <= self.num_failures:
                raise RequestError(503, "EngineError: the engine was closed", can_retry=True)
        return Draft(ChatAnswer(str(self.num_started), (), 3), lambda: None)


async def submit(log, digest=b"a", num_retries=0):
    """Return the answer to a request after its client received it, or the failure."""
    pending = log.submit(REQUEST, digest, num_retries)
    with pending.waiting():
        await asyncio.wait({pending.drafting})
    if (error := pending.drafting.exception()) is not None:
        return error
    pending.deliver()
    return pending.answer


def test_the_repetition_of_a_failed_request_is_sampled_again():
    async def run():
        log = AnswerLog(FailingModel(1), 8)
        assert isinstance(await submit(log), RequestError)
        answer = await submit(log, num_retries=1)
        assert await submit(log, num_retries=2) is answer and log.model.num_started == 2

    asyncio.run(run())


def test_a_request_that_fails_at_the_end_logs_no_traceback(caplog):
    async def run():
        log = AnswerLog(FailingModel(1), 8)
        log.submit(REQUEST, b"a")
        await asyncio.sleep(0)
        log.close()
        with pytest.raises(RequestError, match="has ended"):
            log.submit(REQUEST, b"b")

    asyncio.run(run())
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
