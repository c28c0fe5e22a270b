"""Probes: test conversations that show a renderer how a chat template behaves."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.errors import UnsupportedChat
from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.renderers.special_tokens import first_token_in, token_at_end

MARKER = "AGENTR1MARK"
"""A text that occurs in no usual chat template. Test messages contain this text, so that it can be found."""

PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


@dataclass(frozen=True, slots=True)
class TemplateBehavior:
    """The behavior of a chat template when a message is added after an action.

    Attributes:
        kind: "append" if the earlier text stays unchanged; "rewrite" if the template changes earlier text;
            "unsupported" if the messages cannot be rendered, or the rendered calls cannot be parsed.
        reason: an explanation of ``kind`` for users.
    """

    kind: Literal["append", "rewrite", "unsupported"]
    reason: str


def probe_call(query: str, text: str = "", reasoning: str | None = None) -> Message:
    return Message.assistant(text, (ToolCall("call_0_0", PROBE_TOOL.name, {"query": query}, ""),), reasoning)


def probe_message(boundary: Literal["tool", "user"], thinking: bool, renders_reasoning: bool) -> Message:
    """Return the assistant's message for a test conversation, which shows how a chat template behaves.

    Args:
        boundary: the role of the next message: "tool" if the assistant makes a call, "user" if the assistant answers.
        thinking: whether the assistant's message has reasoning.
        renders_reasoning: whether the template renders reasoning. If not, the reasoning becomes part of the text.
    """
    reasoning = "I see." if thinking and renders_reasoning else None
    inline = "<think>\nI see.\n</think>\n\n" if thinking and not renders_reasoning else ""
    if boundary == "user":
        return Message.assistant(inline + "A page.", (), reasoning)
    return probe_call("there", inline, reasoning)


def comparable(message: Message) -> tuple[object, ...]:
    """Return (calls, reasoning, text) of a message, without the ids of calls and the spaces around the text."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return calls, message.reasoning or "", message.text.strip()


class RenderText(Protocol):
    """A function that renders a conversation as text. Raises UnsupportedChat if the conversation cannot be rendered."""

    def __call__(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = (), *, add_generation_prompt: bool = False
    ) -> str: ...


def find_turn_ends(render: RenderText, special: Collection[str]) -> tuple[str, ...]:
    """Return the special tokens that the template writes after an answer and after a call.

    If the tokens are equal, or no token follows a call, return a single token. ``special`` are the texts of the
    tokenizer's special tokens.

    Raises:
        UnsupportedChat: the template writes no special token after an answer.
    """
    question, answer = Message.user("question"), Message.assistant(MARKER)
    end = token_at_end(_after_marker(render((question, answer))), special)
    if end is None:
        followed = render((question, answer, question), add_generation_prompt=True)
        end = first_token_in(_after_marker(followed), special)
    if end is None:
        raise UnsupportedChat(
            "the chat template writes no special token after an assistant turn, so a turn has no end; "
            "supply a template that ends turns (as <|im_end|> does)"
        )
    return tuple(dict.fromkeys(filter(None, (end, _find_call_end(render, special)))))


def _find_call_end(render: RenderText, special: Collection[str]) -> str | None:
    messages = (Message.user("question"), probe_call(MARKER))
    try:
        alone = _after_marker(render(messages, (PROBE_TOOL,)))
        if end := token_at_end(alone, special):
            return end
        result = Message.tool("A page.", "call_0_0")
        followed = _after_marker(render((*messages, result), (PROBE_TOOL,), add_generation_prompt=True))
    except UnsupportedChat:
        return None
    return first_token_in(followed.removeprefix(alone.rstrip()), special)


def find_result_tags(render: RenderText) -> tuple[str, ...]:
    """Return the two tags that a chat template writes around a tool result; () if there are none.

    Example:
        ("<tool_response>", "</tool_response>")
    """
    messages = (Message.user("question"), probe_call("there"), Message.tool(MARKER, "call_0_0"))
    try:
        text = render(messages, (PROBE_TOOL,))
    except UnsupportedChat:
        return ()
    found = re.search(rf"(<[^<>\s]+>)\s*{MARKER}\s*(</[^<>\s]+>)", text)
    return found.groups() if found else ()


def _after_marker(text: str) -> str:
    return text.rpartition(MARKER)[2]
