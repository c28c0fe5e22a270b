"""The tool format of a tokenizer: the one that its chat template writes, or its own response template."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from agent_r1.core.arguments import parse_json
from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.renderers.chat_template import apply_chat_template, special_tokens
from agent_r1.renderers.formats.delimited_formats import Glm, Lfm2, Qwen35
from agent_r1.renderers.formats.json_formats import DeepSeek, Harmony, Hermes, Llama
from agent_r1.renderers.formats.tags import PLAIN_TEMPLATE, Tags, TagsConfig
from agent_r1.renderers.formats.tool_format import (
    ParsedCall,
    ParsedOutput,
    ToolFormat,
    Tools,
    call_from_json,
    malformed_call,
)
from agent_r1.renderers.protocol import ImageExpander
from agent_r1.renderers.template_renderer import TemplateRenderer


class Response(ToolFormat):
    """The tool format of a tokenizer with a response template, which describes how its model writes messages and calls.

    The parser of transformers reads the calls with this template.
    """

    name: ClassVar[str] = "response"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template: dict[str, Any] = dict(tokenizer.response_template)
        question = [{"role": "user", "content": "question"}]
        with_header, without = (
            apply_chat_template(tokenizer, question, (), add_generation_prompt=added) for added in (True, False)
        )
        # the text at the end of every prompt, such as "<|im_start|>assistant" or "<|im_start|>assistant\n<think>"
        self._header = with_header.removeprefix(without)

    def split_reasoning(self, text: str, opened: bool = False) -> tuple[str | None, str]:
        """Return (reasoning, ``text``). The reasoning is not removed, because :meth:`parse` skips it."""
        message, _ = self._parse(text, ())
        reasoning = message.get("reasoning_content") or message.get("thinking")
        return str(reasoning) if reasoning else None, text

    def parse(self, text: str, tools: Tools) -> ParsedOutput:
        message, calls = self._parse(text, tools)
        return ParsedOutput(str(message.get("content") or ""), tuple(calls))

    def _parse(self, text: str, tools: Tools) -> tuple[Mapping[str, Any], list[ParsedCall]]:
        schemas: list[dict[Any, Any] | Callable[..., Any]] = [tool.to_openai() for tool in tools]
        parser = ResponseParser(self._template, prefix=self._header, tools=schemas or None)
        calls: list[ParsedCall] = []
        start = 0  # the index after the last call
        try:
            # one character at a time, so that the index at which each call ends is known
            for end, character in enumerate(text, start=1):
                start = _add_calls(parser.feed(character), text, start, end, calls)
            message, events = parser.finalize()
            _add_calls(events, text, start, len(text), calls)
        except Exception as error:  # with a third-party template, the parser can raise an exception of any type
            reason = f"it does not follow the model's response template: {' '.join(str(error).split())[:200]}"
            return {}, [*calls, malformed_call(text[start:], len(text), reason)]
        return message, calls


def _add_calls(events: list[dict[str, Any]], text: str, start: int, end: int, calls: list[ParsedCall]) -> int:
    for event in events:
        if event["type"] == "region_close" and event["field"] == "tool_calls":
            raw = text[start:end]
            for value in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                data = value.get("function", value) if isinstance(value, dict) else value
                reason = _json_fault(raw)
                calls.append(malformed_call(raw, end, reason) if reason else call_from_json(data, raw, end))
            start = end
    return start


def _json_fault(raw: str) -> str | None:
    # The parser of transformers accepts NaN, and drops all but the last of equal keys.
    begin = raw.find("{")
    try:
        end = json.JSONDecoder().raw_decode(raw, begin)[1] if begin >= 0 else 0
    except (ValueError, RecursionError):  # the template's own form of a call
        return None
    try:
        parse_json(raw[begin:end] or "{}")
    except ValueError as error:
        return f"the call is not valid JSON: {error}"
    return None


AUTO = "auto"
TEMPLATE_FORMATS: tuple[type[ToolFormat], ...] = (Hermes, Qwen35, Glm, Llama, DeepSeek, Harmony, Lfm2)
"""The tool formats that :func:`detect_format` tries, in this order."""

FORMAT_NAMES = (AUTO, *(known.name for known in TEMPLATE_FORMATS), Response.name, Tags.name)


def open_renderer(
    tokenizer: PreTrainedTokenizerBase,
    name: str = AUTO,
    tags: TagsConfig | None = None,
    stop_token_ids: tuple[int, ...] = (),
    images: ImageExpander | None = None,
) -> TemplateRenderer:
    """Return a renderer for a tokenizer and the tool format ``name``.

    Args:
        tokenizer: the tokenizer, with its chat template. Without a chat template, only the format ``tags`` works.
        name: one of FORMAT_NAMES. With ``auto``, the response template of the tokenizer is used, if there is one.
            Otherwise :func:`detect_format` selects the format.
        tags: the tags of the format ``tags``. Other formats ignore this argument.
        stop_token_ids: tokens that end an action, in addition to the end tokens of the chat template and the tokenizer.
        images: converts images to placeholder tokens; None if the model has no vision.

    Raises:
        InvalidInput: ``name`` is not one of FORMAT_NAMES, or is ``response`` although the tokenizer has no response
            template.
        UnsupportedChat: the chat template cannot be used.
    """
    if name not in FORMAT_NAMES:
        raise InvalidInput("tool_format", got=repr(name), do=f"choose from {', '.join(FORMAT_NAMES)}")
    has_response_template = tokenizer.response_template is not None
    if name == Response.name and not has_response_template:
        got = f"{name}, and a tokenizer without a response_template"
        raise InvalidInput("tool_format", got=got, do=f"choose from {', '.join(FORMAT_NAMES)}")
    if name == Tags.name:
        if not tokenizer.chat_template:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = PLAIN_TEMPLATE
        tool_format: ToolFormat = Tags(tags)
    elif name == Response.name or (name == AUTO and has_response_template):
        tool_format = Response(tokenizer)
    elif name == AUTO:
        tool_format = detect_format(tokenizer, images)
    else:
        tool_format = next(known() for known in TEMPLATE_FORMATS if known.name == name)
    return TemplateRenderer(tokenizer, tool_format, stop_token_ids, images)


def detect_format(tokenizer: PreTrainedTokenizerBase, images: ImageExpander | None = None) -> ToolFormat:
    """Return the first format that can parse tool calls as the tokenizer's chat template writes them.

    If no format can parse them, return Hermes, which works for an agent without tools. Raise UnsupportedChat if no
    renderer can use the template, for example because it writes no special token after a turn.
    """
    refused: UnsupportedChat | None = None
    tokens = {text for _, text in special_tokens(tokenizer)}
    for known in TEMPLATE_FORMATS:
        if not tokens.issuperset(known.required_tokens):
            continue
        try:
            renderer = TemplateRenderer(tokenizer, known(), images=images)
        except UnsupportedChat as error:
            refused = refused or error
            continue
        if renderer.probe_behavior("tool", thinking=False).kind != "unsupported":
            return renderer.tool_format
    if refused is not None:
        raise refused
    return Hermes()


def require_tools(renderer: TemplateRenderer, tools: Tools) -> None:
    """Check that the renderer can be used with the tools.

    Raises:
        UnsupportedChat: the chat template cannot show tools, or the format cannot parse tool calls as the template
            writes them.
        InvalidInput: the settings of the format ``tags`` do not fit the tools (see :meth:`Tags.check`).
    """
    if isinstance(renderer.tool_format, Tags):
        renderer.tool_format.check(tools)
    behavior = renderer.probe_behavior("tool", thinking=False)
    if behavior.kind == "unsupported":
        names = ", ".join(name for name in FORMAT_NAMES if name != Tags.name)
        other = f"another --tool_format ({names}), or a template that renders tools the Hermes way"
        if isinstance(renderer.tool_format, Tags):
            raise UnsupportedChat(f"{behavior.reason}; give {other}")
        tags = "give --tool_format tags, which describes tools in a system message and needs no calls in the template"
        raise UnsupportedChat(f"{behavior.reason}; {tags}, or {other}")
