"""A model that is served for inference: the sampling of the request applies, and nothing is kept."""

import asyncio
import json
import re
import signal
import threading
from collections import Counter

import anthropic
import httpx
import openai
import pytest
from agent_episodes import ANSWER, CALL, QUESTION, SEARCH, TOOLS, RecordingEngine, search_then_answer
from click.testing import CliRunner

from agent_r1.commands.chat import serve as command
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import SamplingParams
from agent_r1.core.messages import Message
from agent_r1.gateway import streams
from agent_r1.gateway.chat import ChatAnswer, ChatRequest, Choice, Draft, LiveAnswer, StreamStart
from agent_r1.gateway.episode import ServedModel
from agent_r1.gateway.server import Gateway
from agent_r1.gateway.streams import LiveReader, live_parts, settled_message
from agent_r1.rollout.agent_loop import Agent
from agent_r1.tasksets.tinywiki.wiki import search
from agent_r1.training.chat import _serve

BODY = {"model": "any", "messages": [QUESTION]}


class Failing(RecordingEngine):
    """Fails in every generation but the first."""

    async def generate(self, prompt, params, *, session_id=None):
        if self.generations:
            raise EngineError("gone")
        return await super().generate(prompt, params, session_id=session_id)


class Stepwise(RecordingEngine):
    """Shows its completion token by token, and pauses in the middle until ``may_go_on`` is set."""

    def __init__(self, renderer, reply):
        super().__init__(renderer, reply)
        self.may_go_on, self.num_cancelled, self.error = asyncio.Event(), 0, None

    async def generate(self, prompt, params, *, session_id=None):
        completion = await super().generate(prompt, params, session_id=session_id)
        ids = completion.token_ids
        for count in range(1, len(ids) + 1):
            if count == len(ids) // 2:
                await self._pause()
            params.on_tokens(ids[:count])
        return completion

    async def _pause(self):
        try:
            await self.may_go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error


def serve(renderer, client_code, *, engine=RecordingEngine, reply=lambda prompt: ANSWER):
    """Serve until ``client_code(client)`` has ended and SIGINT arrives. Return the engine."""
    served = engine(renderer, reply) if isinstance(engine, type) else engine
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


LOOK = "I look for the mayor of Alba, on the page about Alba, which should name the mayor."


def look_and_call(prompt):
    return f"{LOOK}\n{CALL}"


async def chat_texts(client):
    async for chunk in await client.chat.completions.create(**BODY, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        yield delta.content or "".join(call.function.arguments for call in delta.tool_calls or ())


async def response_texts(client):
    tools = [{"type": "function", **SEARCH}]
    async with client.responses.stream(model="any", input="Who rules Alba?", tools=tools) as stream:
        async for event in stream:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                yield event.delta
        response = await stream.get_final_response()
        assert [item.type for item in response.output] == ["message", "function_call"]
        assert response.output_text == LOOK


async def message_texts(client):
    tools = [{"name": "search", "input_schema": SEARCH["parameters"]}]
    options = {"model": "any", "max_tokens": 400, "messages": [QUESTION], "tools": tools}
    base_url = str(client.base_url).removesuffix("/v1/")
    other = anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key)
    async with other, other.messages.stream(**options) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                yield event.delta.text if event.delta.type == "text_delta" else event.delta.partial_json
        assert [block.type for block in (await stream.get_final_message()).content] == ["text", "tool_use"]


@pytest.mark.parametrize("read", [chat_texts, response_texts, message_texts])
def test_a_stream_begins_while_the_answer_is_sampled(renderer, read):
    async def visit(client):
        async for text in read(client):
            texts.append(text)
            assert engine.may_go_on.is_set() or LOOK.startswith("".join(texts))
            if text:
                engine.may_go_on.set()

    engine, texts = Stepwise(renderer, look_and_call), []
    serve(renderer, visit, engine=engine)
    assert "".join(texts) == LOOK + '{"query": "Alba", "k": 2}'


def test_a_served_model_counts_tokens(renderer):
    async def visit(client):
        base_url = str(client.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key) as other:
            count = await other.messages.count_tokens(model="any", messages=[QUESTION])
        assert count.input_tokens == (await client.chat.completions.create(**BODY)).usage.prompt_tokens

    serve(renderer, visit)


def test_a_stream_ends_its_answer_when_the_client_leaves(renderer):
    async def visit(client):
        async with await client.chat.completions.create(**BODY, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        while not engine.num_cancelled:
            await asyncio.sleep(0.01)

    engine = Stepwise(renderer, lambda prompt: LOOK)
    serve(renderer, visit, engine=engine)


def test_equal_streams_in_parallel_get_answers_of_their_own_while_the_first_begins(renderer):
    async def app(scope, receive, send):
        async def send_later(message):
            if message["type"] == "http.response.start":
                begun.append(scope)
                while len(begun) < 2:
                    await asyncio.sleep(0.001)
                engine.may_go_on.set()
            await send(message)

        await gateway._app()(scope, receive, send_later)

    async def ask():
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)
        return set(re.findall(r"chatcmpl-\w+", answer.text))

    async def main():
        first = asyncio.create_task(ask())
        while not begun:
            await asyncio.sleep(0.001)
        return await ask(), await first

    engine, gateway, begun = Stepwise(renderer, lambda prompt: LOOK), Gateway(), []
    key = gateway.register(ServedModel(Agent(engine, renderer, SamplingParams(max_tokens=400), 3000), "mine"))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    (one,), (other,) = asyncio.run(main())
    assert one != other


def test_a_failure_within_a_stream_is_its_last_event(renderer):
    async def visit(client):
        with pytest.raises(openai.APIError, match="gone"):
            async for chunk in await client.chat.completions.create(**BODY, stream=True):
                if chunk.choices[0].delta.content:
                    engine.may_go_on.set()

    engine = Stepwise(renderer, lambda prompt: LOOK)
    engine.error = EngineError("gone")
    serve(renderer, visit, engine=engine)


@pytest.mark.parametrize(
    ("text", "options", "settled"),
    [
        ("The mayor", {}, "The mayor"),
        ("The mayor \n", {}, "The mayor"),
        ("The caf\ufffd", {}, "The caf"),
        ("The mayor <thi", {}, "The mayor"),
        ("1 < 2, says", {}, "1 < 2, says"),
        ("The mayor of Alba is Bruno.\nObserv", {"stop_strings": ("Observation:",)}, "The mayor of Alba is Br"),
        ("The caf\ufffd <thi \ufffd\n", {}, "The caf"),
        (" " * 100_000 + "x", {}, " " * 100_000 + "x"),
        ("x" * 40, {"tools": (search.spec,)}, "x" * 8),
    ],
)
def test_text_that_later_tokens_can_change_is_held_back(text, options, settled):
    request = ChatRequest((), **options)
    assert settled_message(Message.assistant(text), request).text == settled
    with_thought = settled_message(Message.assistant("", (), text), request)
    assert (with_thought.reasoning or "") == (settled if not options else text.rstrip())


@pytest.mark.parametrize(
    ("text", "stop_strings", "settled"),
    [("abcEND", ("END",), "a"), ("abc}", ("}",), "abc"), ("abc} }", ("}",), "abc"), ("abc}END", ("END", "}"), "a")],
)
def test_a_stop_string_is_never_sent(text, stop_strings, settled):
    request = ChatRequest((), stop_strings=stop_strings)
    assert settled_message(Message.assistant(text), request).text == settled


def streamed_texts(texts, final, stop_strings=(), seconds=0.0):
    """Return the pieces of a stream whose tokens have the texts ``texts`` one after the other, and then ``final``.

    Reading a text of None raises an exception. The second result is the number of times that tokens were read.
    """

    def read(token_ids):
        num_reads[len(token_ids)] += 1
        text = texts[len(token_ids) - 1]
        if text is None:
            raise RuntimeError("half a call")
        return settled_message(Message.assistant(text), request)

    async def draft():
        for count in range(1, len(texts) + 1):
            live.set_tokens(range(count))
            while not num_reads[count]:
                await asyncio.sleep(0.001)
        await asyncio.sleep(seconds)
        return Draft(ChatAnswer("1", (Choice(Message.assistant(final), "stop", len(texts)),), 1), lambda: None)

    async def collect():
        return [part async for part in live_parts(live, asyncio.create_task(draft()))]

    request, num_reads = ChatRequest((), stop_strings=stop_strings), Counter()
    live = LiveAnswer(StreamStart("1", 1), read)
    _, *pieces, _ = asyncio.run(collect())
    return [piece.text for piece in pieces], num_reads.total()


@pytest.mark.parametrize(
    ("texts", "final", "stop_strings", "pieces"),
    [
        (["ab", "abcEND"], "abc", ("END",), ["a", "bc"]),
        (["ab", "ab}"], "ab", ("}",), ["ab"]),
        (["ab", "", "abc"], "abc", (), ["ab", "c"]),
        (["ab", None, "abc"], "abcd", (), ["ab", "c", "d"]),
        (["ab"], "xabc", (), ["ab", "xabc"]),
        (["abc"], "abd ab", (), ["abc", "d ab"]),
    ],
)
def test_a_stream_sends_each_text_once(monkeypatch, texts, final, stop_strings, pieces):
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.001)
    assert streamed_texts(texts, final, stop_strings)[0] == pieces


def test_a_stream_reads_tokens_once(monkeypatch):
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.001)
    assert streamed_texts(["ab", "abc"], "abc", seconds=0.05) == (["ab", "c"], 2)


def test_an_unfinished_answer_is_decoded_in_linear_time(renderer, monkeypatch):
    def decode(ids):
        num_decoded.append(len(ids))
        return whole(ids)

    text, num_decoded, whole = "Ärger in Zürich: 很好 😀, says Bruno. " * 50, [], renderer.decode
    ids = (*renderer.encode(text), *renderer.stop_token_ids[:1])
    monkeypatch.setattr(renderer, "decode", decode)
    reader = LiveReader(renderer, ChatRequest(()))
    for count in range(1, len(ids) + 1):
        read = reader.read(ids[:count]).text
        assert text.startswith(read)
    assert read == text.rstrip() and sum(num_decoded) < 20 * len(ids)


@pytest.mark.parametrize(("given", "shown"), [(None, "sk-new"), ("sk-given", None)])
def test_the_command_shows_only_a_key_that_it_made(monkeypatch, given, shown):
    def serve(config, port, key, announce):
        announce("http://127.0.0.1:1/v1", key or "sk-new")

    monkeypatch.setattr("agent_r1.training.chat.serve", serve)
    result = CliRunner().invoke(command, ["tiny-base", "--json", *([] if given is None else ["--api_key", given])])
    assert json.loads(result.stdout)["api_key"] == shown, result.output
    assert "sk-given" not in result.output


def test_requests_go_on_while_a_long_one_is_tokenized(renderer, monkeypatch):
    others_are_done, render = threading.Event(), renderer.render

    def slow(messages, tools=()):
        if messages[-1].text == "a long text":
            assert others_are_done.wait(20), "the tokenizer holds up the other requests"
        return render(messages, tools)

    async def visit(client):
        ask = client.chat.completions.create
        long = asyncio.create_task(ask(model="any", messages=[{"role": "user", "content": "a long text"}]))
        await asyncio.sleep(0)
        assert (await ask(**BODY)).choices[0].message.content == ANSWER
        others_are_done.set()
        assert (await long).choices[0].message.content == ANSWER

    monkeypatch.setattr(renderer, "render", slow)
    serve(renderer, visit)
