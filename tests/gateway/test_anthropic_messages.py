"""The dialect of Anthropic's messages, by Anthropic's own client."""

import anthropic
import pytest
from agent_episodes import ANSWER, PAGE, QUESTION, SEARCH

from agent_r1.core.trajectory import Status
from agent_r1.gateway import chat as dialect

TOOLS = [{"name": "search", "description": "Find a page.", "input_schema": SEARCH["parameters"]}]
OPTIONS = {"model": "any", "max_tokens": 500, "system": "Be brief.", "tools": TOOLS}


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_with_a_tool_continues_its_tokens(episodes, streams):
    async def run(base_url, api_key, task):
        client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)

        async def ask(*messages):
            if not streams:
                return await client.messages.create(messages=messages, **OPTIONS)
            async with client.messages.stream(messages=messages, **OPTIONS) as stream:
                return await stream.get_final_message()

        first = await ask(QUESTION)
        text, call = first.content
        assert first.stop_reason == "tool_use" and text.text == "I look." and first.usage.output_tokens > 20
        assert (call.name, call.input) == ("search", {"query": "Alba", "k": 2})
        said = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": PAGE}]}
        second = await ask(QUESTION, said, {"role": "user", "content": [result]})
        assert second.stop_reason == "end_turn"
        return second.content[0].text

    trajectory = episodes.play(run)
    assert trajectory.status is Status.COMPLETED and trajectory.answer == ANSWER, trajectory.reason
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)
    assert trajectory.start[0].text == "Be brief."


def test_stop_sequences_limits_and_errors_have_the_forms_of_anthropic(episodes):
    def run(base_url, api_key, task):
        client = anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)  # also with the path /v1
        ask = client.messages.create
        stopped = ask(model="any", max_tokens=99, messages=[QUESTION], stop_sequences=["</answer>"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "</answer>")
        assert stopped.content[0].text == "<answer>Bruno"
        assert ask(model="any", max_tokens=3, messages=[QUESTION]).stop_reason == "max_tokens"
        for param, options in (
            ("tool_choice", {"tool_choice": {"type": "tool", "name": "other"}, "tools": TOOLS}),
            ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            ("top_k", {"extra_body": {"top_k": 4}}),
            ("messages.0.content: .* needs content", {"messages": [{"role": "user", "content": []}]}),
            ("messages", {"messages": [QUESTION, {"role": "assistant", "content": "<answer>"}]}),
            ("messages.0", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        ):
            with pytest.raises(anthropic.BadRequestError, match=param):
                ask(**{"model": "any", "max_tokens": 9, "messages": [QUESTION], **options})
        with pytest.raises(anthropic.AuthenticationError, match="API key"):
            client.with_options(api_key="sk-other").messages.create(model="any", max_tokens=9, messages=[QUESTION])
        return "done"

    trajectory = episodes.play(run, lambda prompt: ANSWER)
    assert trajectory.answer == "done" and len(trajectory.turns) == 2, trajectory.reason


def test_the_mark_of_a_failed_tool_has_no_effect(episodes, caplog):
    def run(base_url, api_key, task):
        result = {"type": "tool_result", "tool_use_id": "a", "content": "no such page", "is_error": True}
        with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
            client.messages.create(model="any", max_tokens=99, messages=[{"role": "user", "content": [result]}])

    dialect.warn_once.cache_clear()
    assert len(episodes.play(run).turns) == 1 and "is_error of tool results, which has no effect" in caplog.text


def test_the_tokens_of_a_prompt_are_counted_without_a_turn(episodes):
    def run(base_url, api_key, task):
        with anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0) as client:
            prompt = {"model": "any", "messages": [QUESTION], "tools": TOOLS, "system": "Be brief."}
            count = client.messages.count_tokens(**prompt).input_tokens
            assert count == client.messages.create(max_tokens=9, **prompt).usage.input_tokens > 20
            with pytest.raises(anthropic.BadRequestError, match="context"):
                client.messages.count_tokens(model="any", messages=[{"role": "user", "content": "x" * 200_000}])
            with pytest.raises(anthropic.AuthenticationError):
                client.with_options(api_key="sk-other").messages.count_tokens(**prompt)

    trajectory = episodes.play(run)
    assert trajectory.status is Status.COMPLETED and len(trajectory.turns) == 1, trajectory.reason
