"""The dialect of OpenAI's chat completions, ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from agent_r1.core.messages import Message, Text
from agent_r1.gateway.chat import (
    Body,
    ChatAnswer,
    ChatRequest,
    Choice,
    Dialect,
    DialectRequest,
    EndReason,
    FunctionTool,
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
    read_call,
    read_parts,
    read_stop_strings,
    read_text,
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


class _ImageUrl(Lenient):
    url: str


class _Image(ImagePart):
    type: Literal["image_url"]
    image_url: _ImageUrl

    @property
    def url(self) -> str:
        return self.image_url.url


_Content = str | list[Annotated[TextPart | _Image, Field(discriminator="type")]]


class _Function(Lenient):
    name: str
    arguments: str = ""


class _Call(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Prompt(Lenient):
    role: Literal["system", "developer", "user"]
    content: _Content
    name: str | None = None


class _Assistant(Lenient):
    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: None = None  # of an earlier version of the API


class _ToolResult(Lenient):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str


class _Tool(Lenient):
    type: Literal["function"]
    function: FunctionTool


class _ResponseFormat(Lenient):
    type: Literal["text"]


class _StreamOptions(Lenient):
    include_usage: bool = False


class OpenAIBody(Body):
    """The arguments that both APIs of OpenAI have."""

    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    # accepted, without an effect
    user: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None


class _Body(OpenAIBody):
    messages: list[Annotated[_Prompt | _Assistant | _ToolResult, Field(discriminator="role")]] = Field(min_length=1)
    tools: list[_Tool] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: _ResponseFormat | None = None


def _message(given: _Prompt | _Assistant | _ToolResult, index: int) -> Message:
    param = f"messages.{index}"
    match given:
        case _Assistant():
            calls = tuple(
                read_call(call.id, call.function.name, call.function.arguments, f"{param}.tool_calls.{number}")
                for number, call in enumerate(given.tool_calls or ())
            )
            text = read_text(given.content) or given.refusal or ""
            return Message("assistant", (Text(text),), calls, given.reasoning_content)
        case _ToolResult():
            return Message("tool", read_parts(given.content, f"{param}.content"), call_id=given.tool_call_id)
        case _:
            role: Literal["user", "system"] = "user" if given.role == "user" else "system"
            return Message(role, read_parts(given.content, f"{param}.content"))


def _chat_request(body: _Body) -> ChatRequest:
    if body.top_logprobs:
        raise refuse("top_logprobs", "only the log-probabilities of sampled tokens are available")
    tools = tuple(tool.function.spec() for tool in body.tools or ())
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


@dataclass(slots=True)
class ChatCompletion(DialectRequest):
    """A request for a chat completion."""

    chat: ChatRequest
    streams: bool
    model: str
    streams_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))
    # of the stream: the id of the answer, and the choices that have begun
    id: str = ""
    begun: set[int] = field(default_factory=set)

    def to_json(self, answer: ChatAnswer) -> Json:
        choices = [
            {
                "index": index,
                "message": _message_json(choice.message),
                "logprobs": _logprobs_json(choice),
                "finish_reason": FINISH_REASONS[choice.end],
            }
            for index, choice in enumerate(answer.choices)
        ]
        return {**self._head(answer.id, "chat.completion"), "choices": choices, "usage": _usage_json(answer)}

    def events(self, part: StreamPart) -> Iterator[str]:
        match part:
            case StreamStart():
                self.id = part.id
            case TextDelta():
                yield from self._begin(part.index)
                yield self._chunk(part.index, {"content" if part.kind == "text" else "reasoning_content": part.text})
            case ChatAnswer():
                for index, choice in enumerate(part.choices):
                    yield from self._begin(index)
                    for number, call in enumerate(_calls_json(choice.message)):
                        yield self._chunk(index, {"tool_calls": [{**call, "index": number}]})
                    yield self._chunk(index, {}, _logprobs_json(choice), FINISH_REASONS[choice.end])
                if self.streams_usage:
                    yield self._event([], usage=_usage_json(part))
                yield "data: [DONE]\n\n"

    def _begin(self, index: int) -> Iterator[str]:
        if index not in self.begun:
            self.begun.add(index)
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> str:
        return self._event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}])

    def _event(self, choices: list[Json], **more: Json) -> str:
        return event({**self._head(self.id, "chat.completion.chunk"), "choices": choices, **more})

    def _head(self, id: str, kind: str) -> Json:
        return {"id": f"chatcmpl-{id}", "object": kind, "created": self.created, "model": self.model}


def _message_json(message: Message) -> Json:
    content = message.text or (None if message.calls else "")
    reasoning = {} if message.reasoning is None else {"reasoning_content": message.reasoning}
    calls = {"tool_calls": _calls_json(message)} if message.calls else {}
    return {"role": "assistant", "content": content, "refusal": None, **reasoning, **calls}


def _calls_json(message: Message) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write_arguments(call)}}
        for call in message.calls
    ]


def _logprobs_json(choice: Choice) -> Json | None:
    return {"content": logprob_entries(choice), "refusal": None} if choice.logprobs else None


def logprob_entries(choice: Choice) -> list[Json]:
    """Return the log-probabilities of a choice's tokens, in OpenAI's form."""
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
        for token in choice.logprobs
    ]


def _usage_json(answer: ChatAnswer) -> Json:
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
