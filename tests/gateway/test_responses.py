"""The dialect of OpenAI's responses, by OpenAI's own client."""

import json

import openai
import pytest
from agent_episodes import ANSWER, PAGE, QUESTION, SEARCH

from agent_r1.core.trajectory import Status
from agent_r1.gateway import chat as dialect

TOOLS = [{"type": "function", **SEARCH}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_an_agent_with_a_tool_continues_its_tokens(episodes, streams, by_id):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

        async def ask(items, **options):
            options = {"model": "any", "input": items, "tools": TOOLS, "instructions": "Be brief.", **options}
            if not streams:
                return await client.responses.create(**options)
            async with client.responses.stream(**options) as stream:
                return await stream.get_final_response()

        first = await ask("Who rules Alba?")
        call = first.output[-1]
        assert first.status == "completed" and first.output_text == "I look." and call.type == "function_call"
        assert json.loads(call.arguments) == {"query": "Alba", "k": 2} and first.usage.output_tokens > 20
        result = {"type": "function_call_output", "call_id": call.call_id, "output": PAGE}
        if by_id:
            second = await ask([result], previous_response_id=first.id)
        else:
            second = await ask([QUESTION, *(item.to_dict() for item in first.output), result])
        return second.output_text

    trajectory = episodes.play(run)
    assert trajectory.status is Status.COMPLETED and trajectory.answer == ANSWER, trajectory.reason
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)
    assert trajectory.start[0].text == "Be brief."


def test_limits_and_refusals(episodes):
    def run(base_url, api_key, task):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        cached = {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}}
        cut = client.responses.create(model="any", input="Who?", max_output_tokens=3, truncation="auto", **cached)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.create(model="any", input="Who?", previous_response_id="resp_other")
        for param, options in (
            ("tool_choice", {"tool_choice": {"type": "function", "name": "search"}}),
            ("tools", {"tools": [{"type": "web_search"}]}),
            ("text.format", {"text": {"format": {"type": "json_object"}}}),
            ("background", {"background": True}),
            ("input", {"input": []}),
        ):
            with pytest.raises(openai.BadRequestError, match=param):
                client.responses.create(**{"model": "any", "input": "Who?", **options})
        return "done"

    trajectory = episodes.play(run, lambda prompt: ANSWER)
    assert trajectory.answer == "done" and len(trajectory.turns) == 1, trajectory.reason


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_included_on_request(episodes, streams, caplog):
    def run(base_url, api_key, task):
        options = {
            "model": "any",
            "input": "Who?",
            "include": ["message.output_text.logprobs", "file_search_call.results"],
        }
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            if streams:
                with client.responses.stream(**options) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(**options)
        tokens = response.output[0].content[0].logprobs
        assert (
            "".join(token.token for token in tokens).startswith(ANSWER) and len(tokens) == response.usage.output_tokens
        )

    dialect.warn_once.cache_clear()
    episodes.play(run, lambda prompt: ANSWER)
    assert "include=file_search_call.results, which has no effect" in caplog.text
