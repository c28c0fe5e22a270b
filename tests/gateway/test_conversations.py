"""Which conversations of a client continue sampled tokens, and which start a branch."""

import json

import openai
import pytest
from agent_episodes import CALL, PAGE, QUESTION, TOOLS

from agent_r1.core.messages import Message, ToolCall
from agent_r1.gateway import chat as dialect
from agent_r1.gateway.episode import SentAction, restore_sampled

BEFORE = (Message.user("Who rules Alba?"),)
SAMPLED = Message.assistant(
    "I look. ", (ToolCall("call_0_0", "search", {"query": "Alba", "k": 1}, CALL),), "A thought."
)
SENT = [SentAction(BEFORE, SAMPLED, SAMPLED)]


def returned(text="I look.", arguments='{"k":1,"query":"Alba"}', id="call_0_0", reasoning=None, name="search"):
    return Message.assistant(text, (ToolCall(id, name, json.loads(arguments), arguments),), reasoning)


@pytest.mark.parametrize(
    "message",
    [
        returned(),
        returned("  I\n look."),
        returned(arguments='{ "query": "\\u0041lba", "k": 1 }'),
        returned(id="toolu_7"),
        returned(reasoning="A  thought."),
    ],
)
def test_a_message_written_again_is_the_sampled_action(message):
    result = Message.tool(PAGE, message.calls[0].id)
    assert restore_sampled((*BEFORE, message, result), SENT) == (*BEFORE, SAMPLED, Message.tool(PAGE, "call_0_0"))


@pytest.mark.parametrize(
    "message",
    [
        returned("I look it up."),
        returned(arguments='{"k": true, "query": "Alba"}'),
        returned(arguments='{"k": 2, "query": "Alba"}'),
        returned(name="find"),
        returned(reasoning="Another thought."),
        Message.assistant("I look."),
    ],
)
def test_any_other_message_is_a_text_of_the_client(message):
    assert restore_sampled((*BEFORE, message), SENT) == (*BEFORE, message)


CODE = Message.assistant("\nI look.\n<code>\nsearch('Alba')\n</code>\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CODE.text.strip(), CODE.text),
        (CODE.text.strip() + "\nCalling tools:\n[]", CODE.text + "Calling tools:\n[]"),
        ("I look it up.\n<code>\nsearch('Alba')\n</code>", None),
    ],
)
def test_text_after_the_sampled_text_continues_it(text, expected):
    sent = [SentAction(BEFORE, Message.assistant("I look.\n<code>\nsearch('Alba')"), CODE)]
    restored = restore_sampled((*BEFORE, Message.assistant(text)), sent)
    assert restored == (*BEFORE, Message.assistant(expected or text))


def test_an_action_is_known_only_after_its_own_conversation():
    other = (Message.user("Who rules Bru?"), returned())
    assert restore_sampled(other, SENT) == other


def test_of_equal_actions_the_one_with_the_ids_of_the_client_is_continued():
    again = Message.assistant(
        "I look. ", (ToolCall("call_1_0", "search", {"query": "Alba", "k": 1}, CALL),), "A thought."
    )
    sent = [*SENT, SentAction(BEFORE, again, again)]
    assert restore_sampled((*BEFORE, returned(id="call_0_0")), sent)[1] == SAMPLED
    assert restore_sampled((*BEFORE, returned(id="call_1_0")), sent)[1] == again
    assert restore_sampled((*BEFORE, returned(id="x")), sent)[1] == again


def test_sub_agents_and_rewritten_histories_are_branches(episodes, renderer):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

        async def ask(*messages):
            answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            return answer.choices[0].message

        first = await ask(QUESTION)
        call = {"id": "x1", "type": "function", "function": {"name": "search", "arguments": '{"k":2,"query":"Alba"}'}}
        said = {"role": "assistant", "content": "I look.\n", "tool_calls": [call]}
        assert first.tool_calls[0].id != "x1"
        page = {"role": "tool", "tool_call_id": "x1", "content": [{"type": "text", "text": PAGE}]}
        second = await ask(QUESTION, said, page)
        await ask({"role": "developer", "content": "You check facts."}, {"role": "user", "content": "Is it so?"})
        await ask(QUESTION, {"role": "assistant", "content": "I searched, and found Bruno."}, QUESTION)
        await ask(QUESTION, said, page, second.model_dump(), QUESTION)

    trajectory = episodes.play(run)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, None, None, 1], trajectory.reason
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)
    assert "You check facts." in renderer.decode(trajectory.turns[2].new_ids)


def test_an_agent_that_writes_its_stop_string_and_its_calls_again_continues_its_tokens(episodes, renderer):
    calls = "\nCalling tools:\n[{'name': 'python_interpreter'}]"

    async def run(base_url, api_key, task):
        messages = [QUESTION]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(model="any", messages=messages, stop=["</code>"])
                text = answer.choices[0].message.content
                assert text == "I look.\n<code>\nsearch('Alba')\n"
                messages.append({"role": "assistant", "content": f"{text}</code>{calls}"})
                messages.append({"role": "user", "content": PAGE})

    trajectory = episodes.play(run, lambda prompt: "I look.\n<code>\nsearch('Alba')\n</code> and more")
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1], trajectory.reason
    for turn, (prompt, _, completion) in zip(trajectory.turns, episodes.engine.generations, strict=True):
        assert (trajectory.prompt_ids(turn), turn.action_ids) == (prompt.token_ids, completion.token_ids)
    said = Message.assistant(f"I look.\n<code>\nsearch('Alba')\n</code>{calls}")
    conversation = (Message.user("Who rules Alba?"), *(said, Message.user(PAGE)) * 2)
    assert renderer.decode(prompt.token_ids) == renderer.render(conversation).text


def test_an_answer_with_an_end_is_not_continued_by_text_after_it(episodes, caplog):
    async def run(base_url, api_key, task):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            said, longer = ({"role": "assistant", "content": text} for text in ("Bruno.", "Bruno. I am sure."))
            for history in ([], [said, QUESTION], [said, QUESTION, longer, QUESTION]):
                await client.chat.completions.create(model="any", messages=[QUESTION, *history])
            assert "starts a new branch" not in caplog.text
            await client.chat.completions.create(model="any", messages=[QUESTION, longer, QUESTION])

    dialect.warn_once.cache_clear()
    assert [turn.parent for turn in episodes.play(run, lambda prompt: "Bruno.").turns] == [None, 0, 0, None]
    assert caplog.text.count("starts a new branch") == 1


def test_other_tools_change_the_prompt_and_start_a_branch(episodes):
    async def run(base_url, api_key, task):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        first = await client.chat.completions.create(model="any", messages=[QUESTION], tools=TOOLS)
        said = first.choices[0].message.model_dump(exclude_none=True)
        page = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": PAGE}
        for tools in (TOOLS, [{"type": "function", "function": {"name": "find"}}]):
            await client.chat.completions.create(model="any", messages=[QUESTION, said, page], tools=tools)

    assert [turn.parent for turn in episodes.play(run).turns] == [None, 0, None]
