"""The dialect of OpenAI's responses, ``POST /v1/responses``.

The client sends the conversation with each request, or continues an answer by ``previous_response_id``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.core.tool import ToolSpec
from agent_r1.gateway.chat import Answer, ChatRequest, Choice
from agent_r1.gateway.chat_completions import error_json, logprob_entries
from agent_r1.gateway.dialect import (
    Dialect,
    Json,
    Lenient,
    Strict,
    event,
    pieces,
    read_body,
    read_call,
    read_tool,
    requires_call,
    write_arguments,
)

LOGPROBS = "message.output_text.logprobs"
"""The member of ``include`` that asks for log-probabilities."""

PREFIX = "resp_"
"""The beginning of the id of a response."""


class _Text(Lenient):
    type: Literal["input_text", "output_text", "text"]
    text: str


_Content = str | list[_Text]


class _Message(Lenient):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class _Call(Lenient):
    call_id: str
    name: str
    arguments: str


class _Output(Lenient):
    call_id: str
    output: _Content


class _Summary(Lenient):
    text: str


class _Reasoning(Lenient):
    summary: list[_Summary]
    content: list[_Summary] | None = None


def _item_type(item: Any) -> str | None:
    """Return the type of an input item: its field ``type``, or "message" if there is no such field."""
    return item.get("type", "message") if isinstance(item, dict) else None


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class _Tool(Lenient):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(Lenient):
    type: Literal["text"]


class _TextOptions(Lenient):
    format: _Format | None = None
    verbosity: str | None = None


class _Body(Strict):
    """The JSON body of a request. Fields that cannot change the answer, such as ``user``, are accepted and ignored."""

    model: str
    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    text: _TextOptions | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # accepted, without an effect
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


def _join(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _messages(items: Sequence[_Message | _Call | _Output | _Reasoning]) -> tuple[Message, ...]:
    """Return the messages for the input items. Successive items of the assistant become one message."""
    messages: list[Message] = []
    pending: list[_Message | _Call | _Reasoning] = []

    def finish_assistant() -> None:
        if pending:
            messages.append(_assistant_message(pending))
            pending.clear()

    for item in items:
        match item:
            case _Output():
                finish_assistant()
                messages.append(Message.tool(_join(item.output), item.call_id))
            case _Message() if item.role != "assistant":
                finish_assistant()
                role: Literal["user", "system"] = "user" if item.role == "user" else "system"
                messages.append(Message(role, (Text(_join(item.content)),)))
            case _:
                pending.append(item)
    finish_assistant()
    return tuple(messages)


def _assistant_message(items: Sequence[_Message | _Call | _Reasoning]) -> Message:
    text = "".join(_join(item.content) for item in items if isinstance(item, _Message))
    calls: tuple[ToolCall, ...] = tuple(
        read_call(item.call_id, item.name, item.arguments, "input") for item in items if isinstance(item, _Call)
    )
    thoughts = [part.text for item in items if isinstance(item, _Reasoning) for part in item.content or item.summary]
    return Message("assistant", (Text(text),), calls, "".join(thoughts) if thoughts else None)


def _ignored(body: _Body, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Return the names of the given arguments that would change the sampling, such as ``text.verbosity``.

    These arguments have no effect, because the model always samples from its own distribution. Raise RequestError if
    ``tool_choice`` forces one of several tools.
    """
    asked = {
        f"tool_choice={body.tool_choice}": requires_call(body.tool_choice, tools),
        "parallel_tool_calls=false": body.parallel_tool_calls is False,
        "reasoning.effort": (body.reasoning or {}).get("effort"),
        "text.verbosity": body.text is not None and body.text.verbosity,
        **{f"include={name}": name != LOGPROBS for name in body.include or ()},
    }
    return tuple(name for name, value in asked.items() if value)


def _chat_request(body: _Body) -> ChatRequest:
    tools = tuple(read_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ())
    previous = body.previous_response_id
    return ChatRequest(
        messages=(Message.user(body.input),) if isinstance(body.input, str) else _messages(body.input),
        tools=tools,
        calls_are_text=body.tool_choice == "none",
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=LOGPROBS in (body.include or ()),
        instructions=body.instructions,
        ignored=_ignored(body, tools),
        previous=None if previous is None else previous.removeprefix(PREFIX),
    )


@dataclass(frozen=True, slots=True)
class ResponseExchange:
    """A request in the dialect "responses". Its methods write the answer in the same dialect."""

    chat: ChatRequest
    streams: bool
    body: _Body
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, answer: Answer) -> Json:
        (choice,) = answer.choices
        is_cut = choice.end == "length"
        return {
            **self._head(answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(answer, choice),
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
            },
        }

    def to_events(self, answer: Answer) -> Iterator[str]:
        whole, numbers = self.to_json(answer), count()

        def send(kind: str, **data: object) -> str:
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        empty = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield send("response.created", response=empty)
        yield send("response.in_progress", response=empty)
        for index, item in enumerate(whole["output"]):
            place = {"output_index": index, "item_id": item["id"]}
            yield send("response.output_item.added", output_index=index, item=_opened(item))
            for kind, data in _item_events(item):
                yield send(kind, **place, **data)
            yield send("response.output_item.done", output_index=index, item=item)
        yield send("response.incomplete" if whole["status"] == "incomplete" else "response.completed", response=whole)

    def _head(self, answer: Answer) -> Json:
        body = self.body
        return {
            "id": PREFIX + answer.id,
            "object": "response",
            "created_at": self.created,
            "model": body.model,
            "error": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
        }


def _items(answer: Answer, choice: Choice) -> list[Json]:
    """Return the output items of an answer: its reasoning, its text, and its calls."""
    message, status = choice.message, "incomplete" if choice.end == "length" else "completed"
    items: list[Json] = []
    if message.reasoning is not None:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content})
    if message.text or not message.calls:
        logprobs = logprob_entries(choice)
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": logprobs}
        item: Json = {"type": "message", "role": "assistant", "status": status, "content": [part]}
        items.append({"id": f"msg_{answer.id}", **item})
    for number, call in enumerate(message.calls):
        item = {"type": "function_call", "status": status, "call_id": call.id, "name": call.name}
        items.append({"id": f"fc_{answer.id}_{number}", **item, "arguments": write_arguments(call)})
    return items


def _opened(item: Json) -> Json:
    """Return an output item as the stream first shows it: in progress, and without content."""
    if item["type"] == "function_call":
        return {**item, "status": "in_progress", "arguments": ""}
    return {**item, "content": []} | ({"status": "in_progress"} if item["type"] == "message" else {})


def _item_events(item: Json) -> Iterator[tuple[str, Json]]:
    """Yield (kind, data) of each event that sends the content of an output item.

    The caller adds the index of the item.
    """
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {"delta": piece}
        yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}
        return
    (part,) = item["content"]
    name = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
    extra: Json = {} if item["type"] == "reasoning" else {"logprobs": []}
    yield "response.content_part.added", {"content_index": 0, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield f"{name}.delta", {"content_index": 0, "delta": piece, **extra}
    yield f"{name}.done", {"content_index": 0, "text": part["text"], **extra}
    yield "response.content_part.done", {"content_index": 0, "part": part}


def read(data: Json) -> ResponseExchange:
    """Return the request in the JSON body ``data``. Raise RequestError if the request is invalid."""
    body = read_body(_Body, data)
    return ResponseExchange(_chat_request(body), bool(body.stream), body)


RESPONSES = Dialect(("/v1/responses",), read, error_json)
