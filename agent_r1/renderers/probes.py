"""Probes: messages and a tool that a renderer renders to find out how a chat template behaves."""

from __future__ import annotations

from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.tool import ToolSpec

MARKER = "AGENTR1MARK"
"""A text in the message of a probe. The renderer searches the rendered conversation for this text."""

PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


def probe_call(query: str, text: str = "", reasoning: str | None = None) -> Message:
    """Return an assistant message that calls the probe tool."""
    return Message.assistant(text, (ToolCall("call_0_0", PROBE_TOOL.name, {"query": query}, ""),), reasoning)


def comparable(message: Message) -> tuple[object, ...]:
    """Return the values by which a parsed message is compared with the original: calls, reasoning and text."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return calls, message.reasoning or "", message.text.strip()
