"""Messages and a tool with which a renderer finds out what a chat template does."""

from __future__ import annotations

from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.tool import ToolSpec

MARKER = "AGENTR1MARK"
"""A text that probes put into a message, to find it again in the render."""

PROBE_TOOL = ToolSpec(
    "probe_search",
    "Look something up.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


def probe_call(query: str, text: str = "", reasoning: str | None = None) -> Message:
    """Return a message that calls the probe tool."""
    return Message.assistant(text, (ToolCall("call_0_0", PROBE_TOOL.name, {"query": query}, ""),), reasoning)


def comparable(message: Message) -> tuple[object, ...]:
    """Return what has to be equal if a message was read back."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return calls, message.reasoning or "", message.text.strip()
