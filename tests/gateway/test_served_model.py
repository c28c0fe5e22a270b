"""A model that is served for inference: the sampling of the request applies, and nothing is kept."""

import asyncio
import signal

import openai
import pytest
from agent_episodes import ANSWER, QUESTION, TOOLS, RecordingEngine, search_then_answer

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import SamplingParams
from agent_r1.rollout.agent_loop import Agent
from agent_r1.training.serve import _serve

BODY = {"model": "any", "messages": [QUESTION]}


class Failing(RecordingEngine):
    """Fails in every generation but the first."""

    async def generate(self, prompt, params, *, session_id=None):
        if self.generations:
            raise EngineError("gone")
        return await super().generate(prompt, params, session_id=session_id)


def serve(renderer, client_code, *, engine=RecordingEngine, reply=lambda prompt: ANSWER):
    """Serve until ``client_code(client)`` has ended and SIGINT arrives. Return the engine."""
    served = engine(renderer, reply)
    clients = []

    async def visit(base_url, key):
        try:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
                await client_code(client)
        finally:
            signal.raise_signal(signal.SIGINT)

    async def main():
        agent = Agent(served, renderer, SamplingParams(max_tokens=400), 3000)
        await _serve(agent, "mine", 0, None, lambda *access: clients.append(asyncio.create_task(visit(*access))))
        await clients[0]

    asyncio.run(main())
    return served


def test_the_sampling_of_the_request_applies(renderer):
    async def visit(client):
        ask = client.chat.completions.create
        assert [model.id async for model in client.models.list()] == ["mine"]
        for seed in (7, 7, 8, None):
            answer = await ask(**BODY, n=2, temperature=0.25, top_p=0.5, max_tokens=9, seed=seed)
            assert answer.usage.completion_tokens == 18
        assert (await ask(**BODY)).choices[0].message.content == ANSWER

    engine = serve(renderer, visit)
    *chosen, default = [params for _, params, _ in engine.generations]
    assert {(params.temperature, params.top_p, params.max_tokens) for params in chosen} == {(0.25, 0.5, 9)}
    assert (default.temperature, default.top_p) == (1.0, 1.0)
    first, second, third, fourth = ({params.seed for params in chosen[i : i + 2]} for i in range(0, 8, 2))
    assert first == second and len(first | third | fourth) == 6
    assert len(set(engine.released)) == 5  # each request was a session of its own


def test_the_limit_of_tokens_is_the_room_in_the_context(renderer):
    async def visit(client):
        for max_tokens in (5000, 500, None):
            await client.chat.completions.create(**BODY, **({} if max_tokens is None else {"max_tokens": max_tokens}))

    engine = serve(renderer, visit)
    prompt, _, _ = engine.generations[0]
    room = 3000 - len(prompt.token_ids)
    assert [params.max_tokens for _, params, _ in engine.generations] == [room, 500, 400]


def test_the_ids_of_calls_are_new_in_each_answer(renderer):
    async def visit(client):
        for _ in range(2):
            answer = await client.chat.completions.create(**BODY, tools=TOOLS, n=2)
            ids.extend(choice.message.tool_calls[0].id for choice in answer.choices)

    ids = []
    serve(renderer, visit, reply=search_then_answer)
    assert len(set(ids)) == 4


def test_nothing_is_kept_between_requests(renderer):
    async def visit(client):
        first = await client.responses.create(model="any", input="Who?", tools=[], instructions="Be brief.")
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            await client.responses.create(model="any", input="Why?", previous_response_id=first.id)
        answer = await client.chat.completions.create(**BODY, tools=TOOLS)
        assert answer.choices[0].message.tool_calls

    engine = serve(renderer, visit, reply=search_then_answer)
    assert "Be brief." in renderer.decode(engine.generations[0][0].token_ids)


def test_failures_have_a_status(renderer):
    async def visit(client):
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.chat.completions.create(model="any", messages=[QUESTION] * 400)
        await client.chat.completions.create(**BODY)
        with pytest.raises(openai.InternalServerError, match="gone") as failed:
            await client.chat.completions.create(**BODY)
        assert failed.value.status_code == 503

    serve(renderer, visit, engine=Failing)
