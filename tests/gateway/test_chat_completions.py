"""The dialect of OpenAI's chat completions, by OpenAI's own client."""

import json

import openai
import pytest
from agent_episodes import ANSWER, PAGE, QUESTION, TOOLS

from agent_r1.core.inference import Completion, PolicyVersionSpan
from agent_r1.core.trajectory import Status, TurnTiming
from agent_r1.gateway import chat as dialect, streams as sampled_choice
from agent_r1.rollout.session import Sample


def conversation_after(answer, page=PAGE):
    """The conversation that a client sends after an answer with one call."""
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": page}
    return [QUESTION, message.model_dump(exclude_none=True), result]


def test_an_agent_with_a_tool_continues_its_tokens(episodes, renderer):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        first = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS)
        (call,) = first.choices[0].message.tool_calls
        assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "I look."
        assert json.loads(call.function.arguments) == {"query": "Alba", "k": 2} and call.function.name == "search"
        assert (
            first.model == "any"
            and first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
        )
        second = await client.chat.completions.create(model="any", messages=conversation_after(first), tools=TOOLS)
        assert second.choices[0].finish_reason == "stop"
        return second.choices[0].message.content

    trajectory = episodes.play(run)
    assert trajectory.status is Status.COMPLETED and trajectory.answer == ANSWER, trajectory.reason
    one, two = trajectory.turns
    assert (one.parent, two.parent) == (None, 0)
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert trajectory.prompt_ids(turn) == prompt.token_ids and turn.action_ids == completion.token_ids
        assert turn.logprobs == completion.logprobs
    assert [message.text for message in trajectory.messages] == ["Who rules Alba?", "I look.", PAGE, ANSWER]
    assert episodes.engine.released == [str(trajectory.attempt)]


def test_a_stream_carries_the_same_answer(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        async with client.chat.completions.stream(
            model="any", messages=[QUESTION], tools=TOOLS, stream_options={"include_usage": True}, logprobs=True
        ) as stream:
            first = await stream.get_final_completion()
        assert first.choices[0].message.content == "I look." and first.choices[0].finish_reason == "tool_calls"
        assert first.usage.completion_tokens == len(first.choices[0].logprobs.content)
        text, deltas = "", 0
        chunks = await client.chat.completions.create(
            model="any", messages=conversation_after(first), tools=TOOLS, stream=True
        )
        async for chunk in chunks:
            text, deltas = text + (chunk.choices[0].delta.content or ""), deltas + 1
        assert deltas > 2
        return text

    trajectory = episodes.play(run)
    assert trajectory.answer == ANSWER, trajectory.reason
    assert [turn.parent for turn in trajectory.turns] == [None, 0]


def test_alternatives_have_their_own_seeds_and_become_siblings(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="any", messages=[QUESTION], n=3, seed=7, logprobs=True)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        tokens = [entry.token for entry in answer.choices[2].logprobs.content]
        assert "".join(tokens).startswith(ANSWER) and answer.usage.completion_tokens == 3 * len(tokens)
        last = {"role": "assistant", "content": answer.choices[1].message.content}
        await client.chat.completions.create(model="any", messages=[QUESTION, last, QUESTION])

    trajectory = episodes.play(run, lambda prompt: ANSWER)
    assert [turn.parent for turn in trajectory.turns] == [None, None, None, 2], trajectory.reason
    assert len({params.seed for _, params, _ in episodes.engine.generations}) == 4


def test_the_sampling_of_the_run_applies(episodes, caplog):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.chat.completions.create(model="any", messages=[QUESTION], temperature=0.25, top_p=0.5, seed=3)

    dialect.warn_once.cache_clear()
    episodes.play(run)
    ((_, params, _),) = episodes.engine.generations
    assert (params.temperature, params.top_p) == (1.0, 1.0)
    assert all(text in caplog.text for text in ("asks for temperature 0.25", "asks for top_p 0.5", "sends a seed"))


def test_stop_strings_and_token_limits_end_an_answer(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ask = client.chat.completions.create
        stopped = await ask(model="any", messages=[QUESTION], stop=["</answer>", "!"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("<answer>Bruno", "stop")
        said = {"role": "assistant", "content": "<answer>Bruno"}
        await ask(model="any", messages=[QUESTION, said, QUESTION], max_tokens=1000)
        short = await ask(model="any", messages=[QUESTION], max_completion_tokens=4, max_tokens=9)
        assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (4, "length")

    trajectory = episodes.play(run, lambda prompt: ANSWER + " and more")
    assert trajectory.status is Status.COMPLETED, trajectory.reason  # the agent set the limit that cut its last answer
    first, second, _ = trajectory.turns
    assert first.action.text == ANSWER and second.parent == 0  # the stop string is part of what was sampled


IGNORED = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "reasoning_effort": "low",
    "verbosity": "low",
}


def test_arguments_that_would_change_the_distribution_are_ignored_with_one_warning(episodes, caplog):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS, **IGNORED)
            assert answer.choices[0].message.tool_calls

    dialect.warn_once.cache_clear()
    assert len(episodes.play(run).turns) == 2
    assert all(caplog.text.count(name) == 1 for name in IGNORED), caplog.text


def test_names_have_no_effect_and_a_refusal_is_a_text(episodes, renderer, caplog):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        said = {"role": "assistant", "content": None, "refusal": "I will not say."}
        await client.chat.completions.create(model="any", messages=[{**QUESTION, "name": "Carla"}, said, QUESTION])

    dialect.warn_once.cache_clear()
    assert len(episodes.play(run).turns) == 1
    ((prompt, _, _),) = episodes.engine.generations
    text = renderer.decode(prompt.token_ids)
    assert "I will not say." in text and "Carla" not in text and "names of messages, which has no effect" in caplog.text


def test_a_forced_call_of_the_only_tool_is_sampled(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        choice = {"type": "function", "function": {"name": "search"}}
        answer = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS, tool_choice=choice)
        return answer.choices[0].message.tool_calls[0].function.name

    assert episodes.play(run).answer == "search"


def test_an_answer_without_calls_continues_the_conversation_with_tools(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        first = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS)
        messages = conversation_after(first)
        await client.chat.completions.create(model="any", messages=messages, tools=TOOLS, tool_choice="none")

    assert [turn.parent for turn in episodes.play(run).turns] == [None, 0]


def test_calls_are_text_if_the_request_offers_no_tools(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ask = client.chat.completions.create
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = (await ask(model="any", messages=[QUESTION], **options)).choices
            assert choice.message.tool_calls is None and "<tool_call>" in choice.message.content

    assert episodes.play(run).status is Status.COMPLETED


HALF_CHARACTER = '<tool_call>\n{"name": "search", "arguments": {"query": "\\ud83d"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_cannot_be_encoded_is_text(episodes, stream):
    def run(base_url, api_key, task):
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            answer = client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS, stream=stream)
            if stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            return answer.choices[0].message.content

    trajectory = episodes.play(run, lambda prompt: HALF_CHARACTER)
    assert trajectory.answer == HALF_CHARACTER and len(trajectory.turns) == 1, trajectory.reason


class CountingRenderer:
    """Counts the tokens that it decodes."""

    def __init__(self, renderer):
        self.renderer, self.num_decoded = renderer, 0

    def decode(self, ids):
        self.num_decoded += len(ids)
        return self.renderer.decode(ids)


@pytest.mark.parametrize("end", ["", "😀"])
def test_log_probabilities_of_long_answers_are_decoded_in_linear_time(renderer, end):
    ids = renderer.encode("Ärger in Zürich: 很好 😀 " * 50 + end)
    ids = ids[:-1] if end else ids  # the last character is then incomplete
    text = renderer.decode(ids)
    counting = CountingRenderer(renderer)
    completion = Completion(ids, (-0.5,) * len(ids), "stop", (PolicyVersionSpan(0, 0),))
    sample = Sample(None, completion, None, (), "act", TurnTiming(0.0, 1.0))
    tokens = sampled_choice._token_logprobs(sample, counting)
    assert "".join(token.text for token in tokens) == text and len(tokens) == len(ids)
    assert counting.num_decoded < 20 * len(ids)


UNSUPPORTED = (
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 2}),
    ("logit_bias", {"logit_bias": {"5": 1.0}}),
    ("response_format.type", {"response_format": {"type": "json_object"}}),
    ("beam_width", {"extra_body": {"beam_width": 4}}),
    ("n", {"n": 1000}),
    ("n", {"n": 65}),  # more than the turns of an episode
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": "x" * 257}),
    ("temperature", {"temperature": 3}),
    ("messages", {"messages": []}),
    ("messages.0", {"messages": [{"role": "pope", "content": "x"}]}),
    ("messages.0", {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}),
    ("messages.0", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
)


def test_what_cannot_be_served_is_refused_by_name(episodes):
    def run(base_url, api_key, task):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        for param, options in UNSUPPORTED:
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**{"model": "any", "messages": [QUESTION], "tools": TOOLS, **options})
            error = refused.value.body
            assert error["param"].startswith(param) and param in error["message"], (param, error)
            assert error["type"] == "invalid_request_error"

    trajectory = episodes.play(run)
    assert trajectory.reason == "the agent ended without an answer of the policy"


@pytest.mark.parametrize(
    "call", ['"args": {"query": "x"}', '"query": "x"', '"arguments": {"query": "x", "query": "y"}']
)
def test_a_call_that_cannot_be_read_is_sent_as_its_text_and_never_as_an_empty_call(episodes, call):
    text, seen = f'<tool_call>\n{{"name": "search", {call}}}\n</tool_call>', []

    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS)
        seen.append(answer.choices[0].message)

    episodes.play(run, lambda prompt: text)
    assert (seen[0].content, seen[0].tool_calls) == (text, None)


def test_a_call_with_parameters_is_sent_with_its_arguments(episodes):
    seen = []

    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS)
        seen.extend(answer.choices[0].message.tool_calls)

    episodes.play(run, lambda prompt: '<tool_call>\n{"name": "search", "parameters": {"query": "x"}}\n</tool_call>')
    assert [call.function.arguments for call in seen] == ['{"query": "x"}']
