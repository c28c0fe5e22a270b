"""The dialect of OpenAI's chat completions, ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.core.messages import ContentPart, Message, Text
from agent_r1.gateway.chat import (
    Answer,
    ChatRequest,
    Choice,
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
    read_call,
    read_image,
    read_stop_strings,
    read_tool,
    refuse,
    write_arguments,
)

FINISH_REASONS: dict[EndReason, str] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}

MAX_CHOICES = 128
"""The largest ``n``, the number of alternative answers to one request."""


class _Part(Lenient):
    type: Literal["text"]
    text: str


class _ImageUrl(Lenient):
    url: str


class _ImagePart(Lenient):
    type: Literal["image_url"]
    image_url: _ImageUrl


_Content = str | list[_Part]
_ImageContent = str | list[Annotated[_Part | _ImagePart, Field(discriminator="type")]]


class _Function(Lenient):
    name: str
    arguments: str = ""


class _Call(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Prompt(Lenient):
    role: Literal["system", "developer", "user"]
    content: _ImageContent
    name: str | None = None


class _Assistant(Lenient):
    role: Literal["assistant"]
    content: _Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: None = None  # of an earlier version of the API


class _ToolResult(Lenient):
    role: Literal["tool"]
    content: _ImageContent
    tool_call_id: str


class _ToolFunction(Lenient):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Lenient):
    type: Literal["function"]
    function: _ToolFunction


class _ResponseFormat(Lenient):
    type: Literal["text"]


class _StreamOptions(Lenient):
    include_usage: bool = False


class _Body(Strict):
    model: str
    messages: list[Annotated[_Prompt | _Assistant | _ToolResult, Field(discriminator="role")]] = Field(min_length=1)
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: _ResponseFormat | None = None
    # accepted, without an effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def _text(content: _Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _message(given: _Prompt | _Assistant | _ToolResult, index: int) -> Message:
    match given:
        case _Assistant():
            param = f"messages.{index}.tool_calls"
            calls = tuple(
                read_call(call.id, call.function.name, call.function.arguments, f"{param}.{number}")
                for number, call in enumerate(given.tool_calls or ())
            )
            text = _text(given.content) or given.refusal or ""
            return Message("assistant", (Text(text),), calls, given.reasoning_content)
        case _ToolResult():
            return Message("tool", _parts(given.content, index), call_id=given.tool_call_id)
        case _:
            return Message("user" if given.role == "user" else "system", _parts(given.content, index))


def _parts(content: _ImageContent, index: int) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (Text(content),)
    param = f"messages.{index}.content"
    return merge_parts(
        Text(part.text) if isinstance(part, _Part) else read_image(part.image_url.url, param) for part in content
    )


def _chat_request(body: _Body) -> ChatRequest:
    if body.top_logprobs:
        raise refuse("top_logprobs", "only the log-probabilities of sampled tokens are available")
    tools = tuple(read_tool(t.function.name, t.function.description, t.function.parameters) for t in body.tools or ())
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    without_effect = {
        "parallel_tool_calls=false": body.parallel_tool_calls is False,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "reasoning_effort": body.reasoning_effort,
        "verbosity": body.verbosity,
        "names of messages": any(message.name for message in body.messages if not isinstance(message, _ToolResult)),
    }
    return ChatRequest(
        messages=tuple(_message(message, index) for index, message in enumerate(body.messages)),
        tools=tools,
        calls_are_text=body.tool_choice == "none",
        n=body.n or 1,
        max_tokens=min(limits, default=None),
        stop_strings=read_stop_strings(stop, "stop"),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        logprobs=bool(body.logprobs),
        ignored=ignored_arguments(body.tool_choice, tools, without_effect),
    )


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A request for a chat completion. The methods write the HTTP response."""

    chat: ChatRequest
    streams: bool
    model: str
    streams_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, answer: Answer) -> Json:
        choices = [
            {
                "index": index,
                "message": {**_content_json(choice), "tool_calls": _calls_json(choice)}
                if choice.message.calls
                else _content_json(choice),
                "logprobs": _logprobs_json(choice),
                "finish_reason": FINISH_REASONS[choice.end],
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**self._head(answer.id, "chat.completion"), "choices": choices, "usage": _usage_json(answer)}

    def event_writer(self) -> EventWriter:
        return _ChunkWriter(self).write

    def _head(self, id: str, kind: str) -> Json:
        return {"id": f"chatcmpl-{id}", "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class _ChunkWriter:
    request: ChatCompletion
    id: str = ""
    begun: set[int] = field(default_factory=set)

    def write(self, part: Part) -> Iterator[str]:
        match part:
            case Opening():
                self.id = part.id
            case Piece():
                yield from self._begin(part.index)
                yield self._chunk(part.index, {"content" if part.kind == "text" else "reasoning_content": part.text})
            case Answer():
                for index, choice in enumerate(part.choices):
                    yield from self._begin(index)
                    yield from self._calls(index, choice)
                    yield self._chunk(index, {}, _logprobs_json(choice), FINISH_REASONS[choice.end])
                if self.request.streams_usage:
                    yield self._event([], usage=_usage_json(part))
                yield "data: [DONE]\n\n"

    def _begin(self, index: int) -> Iterator[str]:
        if index not in self.begun:
            self.begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def _calls(self, index: int, choice: Choice) -> Iterator[str]:
        for number, call in enumerate(_calls_json(choice)):
            arguments = call["function"]["arguments"]
            opening = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
            yield self._chunk(index, {"tool_calls": [opening]})
            for piece in pieces(arguments):
                yield self._chunk(index, {"tool_calls": [{"index": number, "function": {"arguments": piece}}]})

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event([choice])

    def _event(self, choices: list[Json], **more: Json) -> str:
        return event({**self.request._head(self.id, "chat.completion.chunk"), "choices": choices, **more})


def _content_json(choice: Choice) -> Json:
    message = choice.message
    content = message.text or (None if message.calls else "")
    reasoning = {} if message.reasoning is None else {"reasoning_content": message.reasoning}
    return {"role": "assistant", "content": content, "refusal": None, **reasoning}


def _calls_json(choice: Choice) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write_arguments(call)}}
        for call in choice.message.calls
    ]


def _logprobs_json(choice: Choice) -> Json | None:
    return {"content": logprob_entries(choice), "refusal": None} if choice.logprobs else None


def logprob_entries(choice: Choice) -> list[Json]:
    """Return the log-probabilities of a choice's tokens, in OpenAI's form."""
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
        for token in choice.logprobs
    ]


def _usage_json(answer: Answer) -> Json:
    prompt, completion = answer.num_prompt_tokens, answer.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def read(data: Json) -> ChatCompletion:
    body = read_body(_Body, data)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return ChatCompletion(_chat_request(body), bool(body.stream), body.model, usage)


def error_json(error: RequestError) -> Json:
    """Return the JSON body of an error response, in OpenAI's format."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if error.status >= 500 else kinds.get(error.status, "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


CHAT_COMPLETIONS = Dialect(("/v1/chat/completions",), read, error_json)
