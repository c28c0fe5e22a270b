"""DeepSeek tool calls between special tokens: JSON in a fence (V3 and R1), or JSON without a fence (V3.1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from agent_r1.core.messages import Message, to_openai
from agent_r1.renderers.formats.tool_format import (
    THINK_CLOSE,
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_with_arguments,
    malformed_call,
    split_blocks,
)

BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
OPEN, CLOSE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepSeek(ToolFormat):
    """The tool format of DeepSeek V3, R1 and V3.1. The templates of V3 and R1 do not describe tools to the model."""

    name: ClassVar[str] = "deepseek"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        content = text.partition(BEGIN)[0].partition(OPEN)[0]
        return ParsedOutput(content, tuple(_parse_call(block) for block in split_blocks(text, OPEN, CLOSE)))

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template(message) for message in messages]

    def tool_instructions(self, tools: Tools) -> str:
        shown = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
        call = f"{OPEN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CLOSE}"
        return f"# Tools\n{shown}\n\nTo use tools, end with one block of calls:\n{BEGIN}{call}{END}"


def _to_template(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if "tool_calls" in data:
        # the templates drop reasoning from the content of answers, but not from the content of calls
        data["content"] = message.text.rpartition(THINK_CLOSE)[2].lstrip("\n")
    for call in data.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return data


def _parse_call(block: CallBlock) -> ParsedCall:
    if not block.is_closed:
        return malformed_call(block.text, block.end, f"the call is not closed by {CLOSE}")
    head, separator, rest = block.text.partition(SEPARATOR)
    if not separator:
        return malformed_call(block.text, block.end, f"the call has no {SEPARATOR}")
    if head.strip() != "function":
        return call_with_arguments(head.strip(), rest, block.text, block.end)
    name, _, body = rest.partition("\n")
    body = body.strip()
    if not (body.startswith("```json") and body.endswith("```") and len(body) >= 10):
        return malformed_call(block.text, block.end, "the arguments are not in a fence of ```json", name.strip())
    return call_with_arguments(name.strip(), body[7:-3], block.text, block.end)
