"""Tool calls of Hermes, Qwen2.5 and Qwen3: a JSON object between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.tool_format import (
    THINK_CLOSE,
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    call_with_arguments,
    malformed_call,
    parse_json,
    split_blocks,
    text_before,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = re.compile(rf"{OPEN}\s*"), re.compile(rf"\s*{CLOSE}")


class Hermes(ToolFormat):
    """The tool format of Hermes, Qwen2.5 and Qwen3.

    Example: <tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>
    """

    name: ClassVar[str] = "hermes"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        calls: list[ParsedCall] = []
        opened = _OPEN.search(text)
        while opened:
            calls.append(_parse_call(text, opened.start() + len(OPEN), opened.end()))
            opened = _OPEN.search(text, calls[-1].end)
        return ParsedOutput(text_before(text, OPEN), tuple(calls))


def _parse_call(text: str, start: int, value: int) -> ParsedCall:
    closed = None
    with suppress(ValueError, RecursionError):  # decode the JSON, because a string in it can contain the closing tag
        closed = _CLOSE.match(text, json.JSONDecoder().raw_decode(text, value)[1])
    if closed is not None:
        end = closed.end()
    else:
        inside, _, _ = text[start:].partition(OPEN)
        inside, closing, _ = inside.partition(CLOSE)
        end = start + len(inside + closing)
        if not closing:
            return malformed_call(inside, end, f"the call is not closed by {CLOSE}")
    raw = text[start:end].removesuffix(CLOSE)
    try:
        return call_from_json(_with_arguments(parse_json(raw)), raw, end)
    except ValueError as error:
        return malformed_call(raw, end, f"the call is not valid JSON: {error}")


def _with_arguments(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    arguments = data.get("arguments", {})
    try:
        return data | {"arguments": parse_json(arguments) if isinstance(arguments, str) else arguments}
    except ValueError:
        return data


TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|type)"')


class Llama(ToolFormat):
    """The tool format of Llama 3: a text with calls begins with a JSON object.

    The tag ``<|python_tag|>`` can come before the object. Without the tag, a JSON object is a call only if it has a
    name and parameters, or the name of a known tool. Several calls are separated by ``;``. Text after the calls is
    dropped. Without tools, every text is an answer.

    Example: {"name": "add", "parameters": {"a": 1}}
    """

    name: ClassVar[str] = "llama3"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        stripped = text.lstrip()
        tagged = stripped.startswith(TAG)
        start = len(text) - len(stripped) + tagged * len(TAG)
        calls = _parse_calls(text, start, tagged, frozenset(tool.name for tool in tools)) if tools else ()
        return ParsedOutput("" if calls else text, calls)

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template(message) for message in messages]


def _to_template(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if len(data.get("tool_calls", ())) > 1:  # the template refuses several calls in one message
        del data["tool_calls"]
        data["content"] = "; ".join(call.raw for call in message.calls)
    return data


def _parse_calls(text: str, start: int, tagged: bool, known: frozenset[str]) -> tuple[ParsedCall, ...]:
    calls: list[ParsedCall] = []
    while rest := text[start:].lstrip("; \n\t"):
        begin = len(text) - len(rest)
        must_be_call = tagged and not calls
        try:
            _, start = json.JSONDecoder().raw_decode(text, begin)
            data = parse_json(text[begin:start])
        except (ValueError, RecursionError) as error:
            if must_be_call or _LOOKS_LIKE_CALL.match(rest):
                calls.append(malformed_call(rest, len(text), f"the call is not valid JSON: {error}"))
            break
        if not must_be_call and not _is_call(data, known):
            break
        calls.append(call_from_json(data, text[begin:start], start, "parameters"))
    return tuple(calls)


def _is_call(data: object, known: frozenset[str]) -> bool:
    if not isinstance(data, dict) or not isinstance(name := data.get("name"), str):
        return False
    return "parameters" in data or name in known


BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_OPEN, CALL_CLOSE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepSeek(ToolFormat):
    """The tool format of DeepSeek V3, R1 and V3.1. The templates of V3 and R1 do not describe tools to the model."""

    name: ClassVar[str] = "deepseek"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        content = text.partition(BEGIN)[0].partition(CALL_OPEN)[0]
        return ParsedOutput(
            content, tuple(_parse_call_deepseek(block) for block in split_blocks(text, CALL_OPEN, CALL_CLOSE))
        )

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template_deepseek(message) for message in messages]

    def tool_instructions(self, tools: Tools) -> str:
        shown = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
        call = f"{CALL_OPEN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_CLOSE}"
        return f"# Tools\n{shown}\n\nTo use tools, end with one block of calls:\n{BEGIN}{call}{END}"


def _to_template_deepseek(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    if "tool_calls" in data:
        # the templates drop reasoning from the content of answers, but not from the content of calls
        data["content"] = message.text.rpartition(THINK_CLOSE)[2].lstrip("\n")
    for call in data.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return data


def _parse_call_deepseek(block: CallBlock) -> ParsedCall:
    if not block.is_closed:
        return malformed_call(block.text, block.end, f"the call is not closed by {CALL_CLOSE}")
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


START, MESSAGE, CHANNEL = "<|start|>assistant", "<|message|>", "<|channel|>"
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    """The Harmony format. The reasoning is the text on the analysis channel. The token ``<|call|>`` ends an action.

    Example: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}
    """

    name: ClassVar[str] = "harmony"

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        found = _ANALYSIS.match(text)
        return (found[1], text[found.end() :]) if found else (None, text)

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        contents, calls = [], []
        for header, body, end in _split_messages(text):
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                calls.append(call_with_arguments(recipient[1], body, body, end))
            elif "analysis" not in header:
                contents.append(body)
        return ParsedOutput("" if calls else "".join(contents), tuple(calls))

    def to_template(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        return [_to_template_harmony(message) for message in messages]


def _split_messages(text: str) -> Iterator[tuple[str, str, int]]:
    end = 0
    for piece in text.split(START):
        end += len(piece)
        header, mark, body = piece.partition(MESSAGE)
        if mark:
            yield header, body.removesuffix("<|end|>"), end
        elif piece:
            yield (piece, "", end) if "to=" in piece and CHANNEL in piece else ("", piece, end)
        end += len(START)


def _to_template_harmony(message: Message) -> dict[str, Any]:
    data = to_openai(message)
    reasoning = data.pop("reasoning_content", None)
    if reasoning is not None:
        data["thinking"] = _escape_channel(reasoning)
    if message.role == "assistant":
        data["content"] = _escape_channel(data["content"])
    # a malformed call stays a call, because the template requires a call before each tool result
    if any(call.arguments is None for call in message.calls):
        data |= {"content": "", "tool_calls": [_as_written(call) for call in message.calls]}
    return data


def _escape_channel(text: str) -> str:
    return text.replace(CHANNEL, f"{CHANNEL[0]} {CHANNEL[1:]}")


def _as_written(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else dict(call.arguments)
    return {"type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}
