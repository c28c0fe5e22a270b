"""The dialect of Anthropic's Messages API, ``POST /v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.core.messages import Message, Text, ToolCall, ToolSpec, join_texts
from agent_r1.gateway.chat import (
    Body,
    ChatAnswer,
    ChatRequest,
    Dialect,
    DialectRequest,
    EndReason,
    ImagePart,
    Json,
    Lenient,
    RequestError,
    StreamPart,
    StreamStart,
    TextDelta,
    TextPart,
    event,
    ignored_arguments,
    read_body,
    read_parts,
    read_stop_strings,
    read_text,
    refuse,
    write_arguments,
)

STOP_REASONS: dict[EndReason, str] = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class _Source(Lenient):
    type: Literal["base64"]
    media_type: str
    data: str


class _Image(ImagePart):
    type: Literal["image"]
    source: _Source

    @property
    def url(self) -> str:
        return f"data:{self.source.media_type};base64,{self.source.data}"


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
    content: str | list[Annotated[TextPart | _Image, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class _User(Lenient):
    role: Literal["user"]
    content: str | list[Annotated[TextPart | _Image | _ToolResult, Field(discriminator="type")]]


class _Assistant(Lenient):
    role: Literal["assistant"]
    content: str | list[Annotated[TextPart | _Thinking | _ToolUse, Field(discriminator="type")]]


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


class _Body(Body):
    max_tokens: int = Field(ge=1)
    messages: list[Annotated[_User | _Assistant, Field(discriminator="role")]] = Field(min_length=1)
    system: str | list[TextPart] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    thinking: _Thoughts | None = None


def _user_messages(given: _User) -> Iterator[Message]:
    if isinstance(given.content, str):
        yield Message.user(given.content)
        return
    parts: list[TextPart | _Image] = []
    for block in given.content:
        if isinstance(block, _ToolResult):
            yield Message("tool", read_parts(block.content or "", "messages"), call_id=block.tool_use_id)
        else:
            parts.append(block)
    if parts:
        yield Message("user", read_parts(parts, "messages"))


def _assistant_message(given: _Assistant) -> Message:
    blocks = () if isinstance(given.content, str) else given.content
    thoughts = [block.thinking for block in blocks if isinstance(block, _Thinking)]
    calls = tuple(
        ToolCall(block.id, block.name, block.input, json.dumps(block.input))
        for block in blocks
        if isinstance(block, _ToolUse)
    )
    return Message("assistant", (Text(read_text(given.content)),), calls, join_texts(thoughts) if thoughts else None)


def _chat_request(body: _Body) -> ChatRequest:
    if isinstance(body.messages[-1], _Assistant):
        raise refuse("messages", "the last message is the assistant's; an answer cannot be continued")
    choice = body.tool_choice or _ToolChoice(type="auto")
    messages: list[Message] = [] if body.system is None else [Message.system(read_text(body.system))]
    has_failed_result = False
    for index, given in enumerate(body.messages):
        if isinstance(given, _Assistant):
            messages.append(_assistant_message(given))
            continue
        if given.content == []:
            raise refuse(f"messages.{index}.content", "a message of the user needs content")
        messages += _user_messages(given)
        results = [block for block in given.content if isinstance(block, _ToolResult)]
        has_failed_result |= any(result.is_error for result in results)
    tools = tuple(ToolSpec(tool.name, tool.description or "", tool.input_schema) for tool in body.tools or ())
    chosen = choice.type if choice.name is None else {"name": choice.name}
    without_effect = {
        "disable_parallel_tool_use": choice.disable_parallel_tool_use,
        "is_error of tool results": has_failed_result,
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


@dataclass(slots=True)
class AnthropicRequest(DialectRequest):
    """A request to Anthropic's Messages API."""

    chat: ChatRequest
    streams: bool
    model: str
    kinds: list[str] = field(default_factory=list)  # of the stream: the kinds of the blocks that have begun

    def to_json(self, answer: ChatAnswer) -> Json:
        (choice,) = answer.choices
        message = choice.message
        blocks: list[Json] = []
        if message.reasoning is not None:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.text:
            blocks.append({"type": "text", "text": message.text})
        blocks += [{**_call_block(call), "input": dict(call.arguments or {})} for call in message.calls]
        return {
            **self._head(answer.id),
            "content": blocks,
            "stop_reason": STOP_REASONS[choice.end],
            "stop_sequence": choice.stop_string,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
        }

    def events(self, part: StreamPart) -> Iterator[str]:
        match part:
            case StreamStart():
                usage = {"input_tokens": part.num_prompt_tokens, "output_tokens": 0}
                head = {**self._head(part.id), "content": [], "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**head, "usage": usage})
            case TextDelta():
                kind = "text" if part.kind == "text" else "thinking"
                if kind not in self.kinds:
                    yield from self._end_block()
                    block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
                    yield from self._begin_block(block)
                yield self._delta({"type": f"{kind}_delta", kind: part.text})
            case ChatAnswer():
                (choice,) = part.choices
                for call in choice.message.calls:
                    yield from self._end_block()
                    yield from self._begin_block(_call_block(call))
                    yield self._delta({"type": "input_json_delta", "partial_json": write_arguments(call)})
                yield from self._end_block()
                delta = {"stop_reason": STOP_REASONS[choice.end], "stop_sequence": choice.stop_string}
                yield _event("message_delta", delta=delta, usage={"output_tokens": part.num_tokens})
                yield _event("message_stop")

    def _begin_block(self, block: Json) -> Iterator[str]:
        self.kinds.append(block["type"])
        yield _event("content_block_start", index=len(self.kinds) - 1, content_block=block)

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=len(self.kinds) - 1, delta=delta)

    def _end_block(self) -> Iterator[str]:
        if self.kinds:
            yield _event("content_block_stop", index=len(self.kinds) - 1)

    def _head(self, id: str) -> Json:
        return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": self.model}


def _call_block(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _event(kind: str, **data: object) -> str:
    return event({"type": kind, **data}, kind)


def read(data: Json) -> AnthropicRequest:
    body = read_body(_Body, data)
    return AnthropicRequest(_chat_request(body), bool(body.stream), body.model)


def error_json(error: RequestError) -> Json:
    """Return the JSON body of an error response, in Anthropic's format."""
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
