"""Several text parts are read apart: a line break stands between two of them, wherever they come from."""

import pytest

from agent_r1.core.messages import Image, Message, Text, ToolResult, from_openai, join_texts, parts_text, to_openai
from agent_r1.gateway import anthropic_messages, chat_completions, responses
from agent_r1.tools.tool_errors import truncate_output

PNG = Image("9f86d081884c", "image/png", 1, 1)
NUMBERS = tuple(Text(text) for text in ("1", "23", "4"))


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["1", "23", "4"], "1\n23\n4"),
        (["a"], "a"),
        ([], ""),
        (["a\n", "b"], "a\nb"),
        (["a", "\nb"], "a\nb"),
        (["", "a", "", "b", ""], "a\nb"),
        (["a\n\n", "\n\nb"], "a\n\n\n\nb"),
    ],
)
def test_a_line_break_stands_between_two_texts(texts, joined):
    assert join_texts(texts) == joined
    assert Message("tool", tuple(map(Text, texts))).text == joined == parts_text(map(Text, texts))


def test_texts_around_an_image_stay_on_their_side():
    message = Message("user", (*NUMBERS, PNG, *NUMBERS))
    assert [part.get("text") for part in to_openai(message)["content"]] == ["1\n23\n4", None, "1\n23\n4"]
    assert parts_text(message.parts) == f"1\n23\n4\n{PNG}\n1\n23\n4"


def test_results_and_conversations_of_dictionaries_are_joined_alike():
    assert truncate_output(ToolResult(NUMBERS, ok=True), 100).parts == (Text("1\n23\n4"),)
    assert truncate_output(ToolResult(NUMBERS, ok=True), 2).parts == (Text("1\n2\n[cut here: 2 more characters]"),)
    parts = [{"type": "text", "text": part.text} for part in NUMBERS]
    assert to_openai(from_openai({"role": "user", "content": parts}))["content"] == "1\n23\n4"


PARTS = [{"type": "text", "text": part.text} for part in NUMBERS]
INPUTS = [{"type": "input_text", "text": part.text} for part in NUMBERS]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "null"}}
REQUESTS = {
    "chat": (
        chat_completions,
        {
            "messages": [
                {"role": "system", "content": PARTS},
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": PARTS, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": PARTS},
            ]
        },
    ),
    "messages": (
        anthropic_messages,
        {
            "max_tokens": 9,
            "system": PARTS,
            "messages": [
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": [*PARTS, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": PARTS}]},
            ],
        },
    ),
    "responses": (
        responses,
        {
            "input": [
                {"role": "system", "content": INPUTS},
                {"role": "user", "content": INPUTS},
                *({"role": "assistant", "content": [{**part, "type": "output_text"}]} for part in PARTS),
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
                {"type": "function_call_output", "call_id": "c", "output": INPUTS},
            ]
        },
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_dialect_of_the_gateway_joins_alike(name):
    dialect, body = REQUESTS[name]
    messages = dialect.read({"model": "policy", **body}).chat.conversation
    assert [(message.role, message.text) for message in messages] == [
        (role, "1\n23\n4") for role in ("system", "user", "assistant", "tool")
    ]
    assert [call.arguments for message in messages for call in message.calls] == [{}]
