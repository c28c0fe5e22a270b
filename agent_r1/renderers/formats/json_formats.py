"""Tool formats in which the arguments of a call are a JSON object: Hermes and Qwen, Llama, DeepSeek, Harmony."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from agent_r1.core.arguments import parse_json
from agent_r1.core.messages import Message, ToolCall, to_openai
from agent_r1.renderers.formats.tool_format import (
    THINK_CLOSE,
    BlockFormat,
    CallBlock,
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    call_with_arguments,
    malformed_call,
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
            calls.append(_hermes_call(text, opened.start() + len(OPEN), opened.end()))
            opened = _OPEN.search(text, calls[-1].end)
        return ParsedOutput(text_before(text, OPEN), tuple(calls))


def _hermes_call(text: str, start: int, value: int) -> ParsedCall:
    closed = None
    # The end of the JSON value is searched first, because a string in it can contain the closing tag.
    with suppress(ValueError, RecursionError):
        closed = _CLOSE.match(text, json.JSONDecoder().raw_decode(text, value)[1])
    if closed is not None:
        end = closed.end()
    else:
        # Without valid JSON, the call ends before the next one, so that one bad call does not swallow a good one.
        inside, closing, _ = text[start:].partition(OPEN)[0].partition(CLOSE)
        end = start + len(inside + closing)
        if not closing:
            return malformed_call(inside, end, f"the call is not closed by {CLOSE}")
    raw = text[start:end].removesuffix(CLOSE)
    try:
        data = parse_json(raw)
    except ValueError as error:
        return malformed_call(raw, end, f"the call is not valid JSON: {error}")
    return call_from_json(data, raw, end)


PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = frozenset(("arguments", "parameters"))
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:name|type|arguments|parameters)"')


class Llama(ToolFormat):
    """The tool format of Llama 3: a text with calls begins with a JSON object.

    The tag ``<|python_tag|>`` can come before the object. Without the tag, a JSON object is a call only if it has a
    name and parameters, or the name of a known tool. Several calls are separated by ``;``. Text after the calls is
    dropped. Without tools, every text is an answer.
    """

    name: ClassVar[str] = "llama3"

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        calls = tuple(_llama_calls(text, {tool.name for tool in tools})) if tools else ()
        return ParsedOutput("" if calls else text, calls)

    def write_message(self, message: Message) -> dict[str, Any]:
        data = to_openai(message)
        if len(data.get("tool_calls", ())) > 1:  # the template refuses several calls in one message
            del data["tool_calls"]
            data["content"] = "; ".join(map(_llama_text, message.calls))
        return data


def _llama_calls(text: str, known: set[str]) -> Iterator[ParsedCall]:
    stripped = text.lstrip()
    must_be_call = stripped.startswith(PYTHON_TAG)
    end = len(text) - len(stripped.removeprefix(PYTHON_TAG))
    while rest := text[end:].lstrip("; \n\t"):
        start = len(text) - len(rest)
        try:
            _, end = json.JSONDecoder().raw_decode(text, start)
            data = parse_json(text[start:end])
        except (ValueError, RecursionError) as error:
            if must_be_call or _LOOKS_LIKE_CALL.match(rest):
                yield malformed_call(rest, len(text), f"the call is not valid JSON: {error}")
            return
        is_call = isinstance(data, dict) and isinstance(data.get("name"), str)
        if not must_be_call and not (is_call and (data.keys() & _ARGUMENTS or data["name"] in known)):
            return  # an answer can be a JSON object too
        yield call_from_json(data, text[start:end], end)
        must_be_call = False


def _llama_text(call: ToolCall) -> str:
    # The text of a policy's call is kept. The raw text of a client's call holds only its arguments.
    read = [(one.name, one.arguments) for one in _llama_calls(call.raw, {call.name})]
    written = {"name": call.name, "parameters": dict(call.arguments or {})}
    return call.raw if read == [(call.name, call.arguments)] else json.dumps(written, ensure_ascii=False)


BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_OPEN, CALL_CLOSE = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepSeek(BlockFormat):
    """The tool format of DeepSeek V3, R1 and V3.1. The templates of V3 and R1 do not describe tools to the model.

    Example, with the special tokens BEGIN, CALL_OPEN, SEPARATOR, CALL_CLOSE and END:
    BEGIN CALL_OPEN function SEPARATOR add\\n```json\\n{"a": 1}\\n``` CALL_CLOSE END
    """

    name: ClassVar[str] = "deepseek"
    opening, closing = CALL_OPEN, CALL_CLOSE

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        content = text.partition(BEGIN)[0].partition(CALL_OPEN)[0]
        return replace(super().parse(text, tools), content=content)

    def parse_block(self, block: CallBlock, tools: Tools) -> Iterator[ParsedCall]:
        head, separator, rest = block.text.partition(SEPARATOR)
        name, _, body = rest.partition("\n")
        body = body.strip()
        if not separator:
            yield malformed_call(block.text, block.end, f"the call has no {SEPARATOR}")
        elif head.strip() != "function":  # V3.1 writes the name and the arguments without a fence
            yield call_with_arguments(head.strip(), rest, block.text, block.end)
        elif not (body.startswith("```json") and body.endswith("```") and len(body) >= 10):
            yield malformed_call(block.text, block.end, "the arguments are not in a fence of ```json", name.strip())
        else:
            yield call_with_arguments(name.strip(), body[7:-3], block.text, block.end)

    def write_message(self, message: Message) -> dict[str, Any]:
        data = to_openai(message)
        if "tool_calls" in data:
            # the templates drop reasoning from the content of answers, but not from the content of calls
            data["content"] = message.text.rpartition(THINK_CLOSE)[2].lstrip("\n")
        for call in data.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return data

    def tool_instructions(self, tools: Tools) -> str:
        shown = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
        call = f"{CALL_OPEN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_CLOSE}"
        return f"# Tools\n{shown}\n\nTo use tools, end with one block of calls:\n{BEGIN}{call}{END}"


START, MESSAGE, CHANNEL = "<|start|>assistant", "<|message|>", "<|channel|>"
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class Harmony(ToolFormat):
    """The Harmony format. The reasoning is the text on the analysis channel. The token ``<|call|>`` ends an action."""

    name: ClassVar[str] = "harmony"

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        found = _ANALYSIS.match(text)
        return (found[1], text[found.end() :]) if found else (None, text)

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        contents: list[str] = []
        calls: list[ParsedCall] = []
        end = 0
        for part in text.split(START):
            end += len(part)
            header, mark, body = part.partition(MESSAGE)
            if mark:
                body = body.removesuffix("<|end|>")
            elif not ("to=" in part and CHANNEL in part):  # otherwise it is the header of a call that was cut off
                header, body = "", part
            recipient = _RECIPIENT.search(header)
            if recipient and not mark:
                calls.append(
                    malformed_call(header, end, f"the call has no {MESSAGE} before its arguments", recipient[1])
                )
            elif recipient:
                calls.append(call_with_arguments(recipient[1], body, body, end))
            elif "analysis" not in header:
                contents.append(body)
            end += len(START)
        return ParsedOutput("" if calls else "".join(contents), tuple(calls))

    def write_message(self, message: Message) -> dict[str, Any]:
        data = to_openai(message)
        if message.reasoning is not None:
            data["thinking"] = _break_channel(data.pop("reasoning_content"))
        if message.role == "assistant":
            data["content"] = _break_channel(data["content"])
        # a malformed call stays a call, because the template requires a call before each tool result
        if any(call.arguments is None for call in message.calls):
            data |= {"content": "", "tool_calls": [_as_written(call) for call in message.calls]}
        return data


def _break_channel(text: str) -> str:
    return text.replace(CHANNEL, f"{CHANNEL[0]} {CHANNEL[1:]}")  # the template refuses a channel token in a text


def _as_written(call: ToolCall) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else dict(call.arguments)
    return {"type": "function", "function": {"name": call.name or "unknown", "arguments": arguments}}
