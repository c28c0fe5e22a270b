"""Tool calls as DeepSeek writes them: between special tokens, V3 and R1 with a fence of JSON, V3.1 bare.

The templates that ship with V3 and R1 do not show tools to the model, so a system message does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, to_openai
from agent_r1.renderers.formats.tool_format import (
    THOUGHT,
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    arguments_of,
    malformed_call,
    split_blocks,
)

BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
OPEN, CLOSE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepSeek(ToolFormat):
    """``read`` takes the calls of V3 and V3.1 alike; the template writes the one it was made for."""

    name: ClassVar[str] = "deepseek"

    def read(self, said: str, tools: Tools) -> ParsedOutput:
        content = said.partition(BEGIN)[0].partition(OPEN)[0]
        return ParsedOutput(content, tuple(_call(block) for block in split_blocks(said, OPEN, CLOSE)))

    def shaped(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """Its templates join arguments to text: they are handed over as JSON."""
        return [_shaped(message) for message in messages]

    def instruction(self, tools: Tools) -> str:
        shown = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
        call = f"{OPEN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CLOSE}"
        return f"# Tools\n{shown}\n\nTo use tools, end with one block of calls:\n{BEGIN}{call}{END}"


def _shaped(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if "tool_calls" in data:
        data["content"] = message.text.rpartition(THOUGHT)[2].lstrip("\n")  # as the templates do with answers
    for call in data.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return data


def _call(block: CallBlock) -> ParsedCall:
    if not block.closed:
        return malformed_call(block.text, block.end, f"the call is not closed by {CLOSE}")
    head, separator, rest = block.text.partition(SEPARATOR)
    if not separator:
        return malformed_call(block.text, block.end, f"the call has no {SEPARATOR}")
    if head.strip() != "function":
        return arguments_of(head.strip(), rest, block.text, block.end)
    name, _, body = rest.partition("\n")
    body = body.strip()
    if not (body.startswith("```json") and body.endswith("```") and len(body) >= 10):
        return malformed_call(block.text, block.end, "the arguments are not in a fence of ```json", name.strip())
    return arguments_of(name.strip(), body[7:-3], block.text, block.end)
