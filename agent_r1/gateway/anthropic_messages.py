"""The dialect of Anthropic's Messages API, ``POST /v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.core.messages import ContentPart, Message, Text, ToolCall
from agent_r1.gateway.chat import (
    Answer,
    ChatRequest,
    Dialect,
    EndReason,
    EventWriter,
    Json,
    Lenient,
    Opening,
    Part,
    Piece,
    RequestError,
    Strict,
    event,
    ignored_arguments,
    merge_parts,
    pieces,
    read_body,
    read_image,
    read_stop_strings,
    read_tool,
    refuse,
)

STOP_REASONS: dict[EndReason, str] = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class _Text(Lenient):
    type: Literal["text"]
    text: str


class _Source(Lenient):
    type: Literal["base64"]
    media_type: str
    data: str


class _Image(Lenient):
    type: Literal["image"]
    source: _Source


class _Thinking(Lenient):
    type: Literal["thinking"]
    thinking: str


class _ToolUse(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[_Text | _Image, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class _User(Lenient):
    role: Literal["user"]
    content: str | list[Annotated[_Text | _Image | _ToolResult, Field(discriminator="type")]]


class _Assistant(Lenient):
    role: Literal["assistant"]
    content: str | list[Annotated[_Text | _Thinking | _ToolUse, Field(discriminator="type")]]


class _Tool(Lenient):
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thoughts(Lenient):
    type: Literal["disabled"]


class _Body(Strict):
    """The JSON body of a request."""

    model: str
    max_tokens: int = Field(ge=1)
    messages: list[Annotated[_User | _Assistant, Field(discriminator="role")]] = Field(min_length=1)
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    thinking: _Thoughts | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def _join(content: str | list[_Text] | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


def _part(block: _Text | _Image) -> ContentPart:
    if isinstance(block, _Text):
        return Text(block.text)
    return read_image(f"data:{block.source.media_type};base64,{block.source.data}", "messages")


def _user_messages(given: _User) -> Iterator[Message]:
    if isinstance(given.content, str):
        yield Message.user(given.content)
        return
    parts: list[ContentPart] = []
    for block in given.content:
        if isinstance(block, _ToolResult):
            content = (
                [_Text(type="text", text=block.content)] if isinstance(block.content, str) else block.content or ()
            )
            yield Message("tool", merge_parts(map(_part, content)), call_id=block.tool_use_id)
        else:
            parts.append(_part(block))
    if parts:
        yield Message("user", merge_parts(parts))


def _tool_results(body: _Body) -> list[_ToolResult]:
    blocks = [block for given in body.messages if not isinstance(given.content, str) for block in given.content]
    return [block for block in blocks if isinstance(block, _ToolResult)]


def _assistant_message(given: _Assistant) -> Message:
    if isinstance(given.content, str):
        return Message.assistant(given.content)
    text = "".join(block.text for block in given.content if isinstance(block, _Text))
    thoughts = [block.thinking for block in given.content if isinstance(block, _Thinking)]
    calls = tuple(
        ToolCall(block.id, block.name, block.input, json.dumps(block.input))
        for block in given.content
        if isinstance(block, _ToolUse)
    )
    return Message("assistant", (Text(text),), calls, "".join(thoughts) if thoughts else None)


def _chat_request(body: _Body) -> ChatRequest:
    if isinstance(body.messages[-1], _Assistant):
        raise refuse("messages", "the last message is the assistant's; an answer cannot be continued")
    choice = body.tool_choice or _ToolChoice(type="auto")
    messages: list[Message] = [] if body.system is None else [Message.system(_join(body.system))]
    for index, given in enumerate(body.messages):
        if isinstance(given, _User):
            if given.content == []:
                raise refuse(f"messages.{index}.content", "a message of the user needs content")
            messages += _user_messages(given)
        else:
            messages.append(_assistant_message(given))
    tools = tuple(read_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ())
    chosen = choice.type if choice.name is None else {"name": choice.name}
    without_effect = {
        "disable_parallel_tool_use": choice.disable_parallel_tool_use,
        "is_error of tool results": any(block.is_error for block in _tool_results(body)),
    }
    return ChatRequest(
        messages=tuple(messages),
        tools=tools,
        calls_are_text=choice.type == "none",
        max_tokens=body.max_tokens,
        stop_strings=read_stop_strings(body.stop_sequences, "stop_sequences"),
        temperature=body.temperature,
        top_p=body.top_p,
        ignored=ignored_arguments(chosen, tools, without_effect),
    )


@dataclass(frozen=True, slots=True)
class AnthropicMessage:
    """A request to Anthropic's Messages API, with methods that return a given answer in the format of this API."""

    chat: ChatRequest
    streams: bool
    model: str

    def to_json(self, answer: Answer) -> Json:
        (choice,) = answer.choices
        return {
            **self._head(answer.id),
            "content": _blocks(choice.message),
            "stop_reason": STOP_REASONS[choice.end],
            "stop_sequence": choice.stop_string,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
        }

    def event_writer(self) -> EventWriter:
        return _EventWriter(self).write

    def _head(self, id: str) -> Json:
        return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": self.model}


@dataclass(slots=True)
class _EventWriter:
    request: AnthropicMessage
    kinds: list[str] = field(default_factory=list)

    def write(self, part: Part) -> Iterator[str]:
        match part:
            case Opening():
                usage = {"input_tokens": part.num_prompt_tokens, "output_tokens": 0}
                head = {**self.request._head(part.id), "content": [], "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**head, "usage": usage})
            case Piece():
                kind = "text" if part.kind == "text" else "thinking"
                if kind not in self.kinds:
                    yield from self._end_block()
                    block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
                    yield _event("content_block_start", index=len(self.kinds), content_block=block)
                    self.kinds.append(kind)
                yield _delta(len(self.kinds) - 1, f"{kind}_delta", kind, part.text)
            case Answer():
                yield from self._end_block()
                (choice,) = part.choices
                for index, block in enumerate(_calls(choice.message), start=len(self.kinds)):
                    yield from _call_events(index, block)
                delta = {"stop_reason": STOP_REASONS[choice.end], "stop_sequence": choice.stop_string}
                yield _event("message_delta", delta=delta, usage={"output_tokens": part.num_tokens})
                yield _event("message_stop")

    def _end_block(self) -> Iterator[str]:
        if self.kinds:
            yield _event("content_block_stop", index=len(self.kinds) - 1)


def _blocks(message: Message) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    return blocks + _calls(message)


def _calls(message: Message) -> list[Json]:
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments or {})}
        for call in message.calls
    ]


def _call_events(index: int, block: Json) -> Iterator[str]:
    yield _event("content_block_start", index=index, content_block={**block, "input": {}})
    for piece in pieces(json.dumps(block["input"], ensure_ascii=False)):
        yield _delta(index, "input_json_delta", "partial_json", piece)
    yield _event("content_block_stop", index=index)


def _delta(index: int, kind: str, key: str, text: str) -> str:
    return _event("content_block_delta", index=index, delta={"type": kind, key: text})


def _event(kind: str, **data: object) -> str:
    return event({"type": kind, **data}, kind)


def read(data: Json) -> AnthropicMessage:
    body = read_body(_Body, data)
    return AnthropicMessage(_chat_request(body), bool(body.stream), body.model)


def error_json(error: RequestError) -> Json:
    """Return the JSON body of an error response, in Anthropic's format.

    Example:
        {"type": "error", "error": {"type": "rate_limit_error", "message": "too many requests"}}
    """
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    kind = kinds.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


# Anthropic's client appends /v1/messages to its base URL. The second path accepts the base URL for OpenAI's clients,
# which ends with /v1.
PATHS = ("/v1/messages", "/v1/v1/messages")
ANTHROPIC_MESSAGES = Dialect(PATHS, read, error_json, tuple(f"{path}/count_tokens" for path in PATHS))
