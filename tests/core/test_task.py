"""Task and message construction from text and OpenAI-style dictionaries."""

import copy
import pickle
from dataclasses import replace

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, Text, ToolCall, from_openai, to_openai
from agent_r1.core.task import Task

CALL = ToolCall("call_0", "search", {"query": "Alba"}, "")


def test_a_task_takes_text_dictionaries_or_messages():
    question = (Message.user("Who?"),)
    for given in ("Who?", [{"role": "user", "content": "Who?"}], question, [Message.user("Who?")]):
        assert Task("t", given).messages == question
    assert Task("t", ()).messages == ()
    assert (Task("t", "Who?").data, Task("t", "Who?").split) == ({}, "train")


def test_a_task_is_a_value():
    task = Task("t", "Who?", {"answers": ("Bruno",)}, "test")
    assert replace(task, id="u") == Task("u", "Who?", {"answers": ("Bruno",)}, "test")
    assert pickle.loads(pickle.dumps(task)) == task == copy.deepcopy(task)
    with pytest.raises(AttributeError):
        task.id = "u"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (7, "'int' object is not iterable"),
        (["Who?"], "an object of type str where a message belongs"),
        ([{"content": "Who?"}], "the role None"),
        ([{"role": "user", "content": 7}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "neither text nor image_url"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "without a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "got array"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_in_one_line(messages, error):
    with pytest.raises(
        InvalidInput, match=r"messages of task t: got .*; give text, Messages, or dictionaries"
    ) as refused:
        Task("t", messages)
    assert error in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "message",
    [
        Message.system("Be brief."),
        Message.assistant("Let me see.", (CALL,), "Hm."),
        Message.tool("A page.", "call_0"),
    ],
)
def test_openai_dictionaries_and_messages_convert_both_ways(message):
    assert from_openai(to_openai(message)) == message


def test_openai_arguments_may_be_json_text_and_content_may_be_parts():
    data = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let "}, {"type": "text", "text": "me see."}],
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"query": "Alba"}'}}
        ],
    }
    message = from_openai(data)
    assert message.text == "Let \nme see." and message.parts == (Text("Let "), Text("me see."))
    assert message.calls == (ToolCall("x", "search", {"query": "Alba"}, '{"query": "Alba"}'),)
