"""The dialect of OpenAI's Responses API, ``POST /v1/responses``.

A request contains the whole conversation, or continues an answer by ``previous_response_id``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from agent_r1.core.messages import ContentPart, Message, Text, ToolCall
from agent_r1.gateway.chat import (
    Answer,
    ChatRequest,
    Choice,
    Dialect,
    EventWriter,
    Json,
    Lenient,
    Opening,
    Part,
    Piece,
    Strict,
    event,
    ignored_arguments,
    merge_parts,
    pieces,
    read_body,
    read_call,
    read_image,
    read_tool,
    write_arguments,
)
from agent_r1.gateway.chat_completions import error_json, logprob_entries

LOGPROBS = "message.output_text.logprobs"
"""The entry of the argument ``include`` that requests log-probabilities."""

PREFIX = "resp_"


class _Text(Lenient):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Image(Lenient):
    type: Literal["input_image"]
    image_url: str


_Content = str | list[Annotated[_Text | _Image, Field(discriminator="type")]]


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
    return content if isinstance(content, str) else "".join(part.text for part in content if isinstance(part, _Text))


def _parts(content: _Content) -> tuple[ContentPart, ...]:
    if isinstance(content, str):
        return (Text(content),)
    return merge_parts(
        Text(part.text) if isinstance(part, _Text) else read_image(part.image_url, "input") for part in content
    )


def _messages(items: Sequence[_Message | _Call | _Output | _Reasoning]) -> tuple[Message, ...]:
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
                messages.append(Message("tool", _parts(item.output), call_id=item.call_id))
            case _Message() if item.role != "assistant":
                finish_assistant()
                role: Literal["user", "system"] = "user" if item.role == "user" else "system"
                messages.append(Message(role, _parts(item.content)))
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


def _chat_request(body: _Body) -> ChatRequest:
    tools = tuple(read_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ())
    previous = body.previous_response_id
    without_effect = {
        "parallel_tool_calls=false": body.parallel_tool_calls is False,
        "reasoning.effort": (body.reasoning or {}).get("effort"),
        "text.verbosity": body.text is not None and body.text.verbosity,
        **{f"include={name}": name != LOGPROBS for name in body.include or ()},
    }
    return ChatRequest(
        messages=(Message.user(body.input),) if isinstance(body.input, str) else _messages(body.input),
        tools=tools,
        calls_are_text=body.tool_choice == "none",
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=LOGPROBS in (body.include or ()),
        instructions=body.instructions,
        ignored=ignored_arguments(body.tool_choice, tools, without_effect),
        previous=None if previous is None else previous.removeprefix(PREFIX),
    )


@dataclass(frozen=True, slots=True)
class ResponseExchange:
    """A request to OpenAI's Responses API. The methods write the HTTP response."""

    chat: ChatRequest
    streams: bool
    body: _Body
    created: int = field(default_factory=lambda: int(time.time()))

    def to_json(self, answer: Answer) -> Json:
        (choice,) = answer.choices
        is_cut = choice.end == "length"
        return {
            **self._head(answer.id),
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

    def event_writer(self) -> EventWriter:
        return _EventWriter(self).write

    def _head(self, id: str) -> Json:
        body = self.body
        return {
            "id": PREFIX + id,
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
    message, status = choice.message, "incomplete" if choice.end == "length" else "completed"
    items: list[Json] = []
    if message.reasoning is not None:
        items.append(_reasoning_item(answer.id, message.reasoning))
    if message.text or not message.calls:
        items.append(_message_item(answer.id, message.text, status, logprob_entries(choice)))
    for number, call in enumerate(message.calls):
        item = {"type": "function_call", "status": status, "call_id": call.id, "name": call.name}
        items.append({"id": f"fc_{answer.id}_{number}", **item, "arguments": write_arguments(call)})
    return items


def _reasoning_item(id: str, text: str) -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content}


def _message_item(id: str, text: str, status: str, logprobs: list[Json]) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": [part]}


@dataclass(slots=True)
class _EventWriter:
    exchange: ResponseExchange
    id: str = ""
    items: list[Json] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    def write(self, part: Part) -> Iterator[str]:
        match part:
            case Opening():
                self.id = part.id
                empty: Json = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
                for kind in ("response.created", "response.in_progress"):
                    yield self._event(kind, response={**self.exchange._head(part.id), **empty})
            case Piece():
                yield from self._piece(part)
            case Answer():
                yield from self._finish(self.exchange.to_json(part))

    def _piece(self, piece: Piece) -> Iterator[str]:
        is_text = piece.kind == "text"
        if not self.items or (is_text and self.items[-1]["type"] == "reasoning"):
            yield from self._end_item()
            item = _message_item(self.id, "", "in_progress", []) if is_text else _reasoning_item(self.id, "")
            yield from self._begin_item(item)
        (content,) = self.items[-1]["content"]
        content["text"] += piece.text
        yield self._item_event(
            f"response.{content['type']}.delta", content_index=0, delta=piece.text, **_extra(content)
        )

    def _finish(self, response: Json) -> Iterator[str]:
        begun = [item["type"] for item in self.items]
        if self.items:
            self.items[-1] = next((i for i in response["output"] if i["type"] == begun[-1]), self.items[-1])
            yield from self._end_item()
        for item in response["output"]:
            if item["type"] not in begun:
                yield from self._begin_item(item)
                yield from self._end_item()
        is_cut = response["status"] == "incomplete"
        yield self._event("response.incomplete" if is_cut else "response.completed", response=response)

    def _begin_item(self, item: Json) -> Iterator[str]:
        self.items.append(item)
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self.items) - 1, item=item | empty | status)
        for part in item.get("content", ()):
            yield self._item_event("response.content_part.added", content_index=0, part={**part, "text": ""})

    def _end_item(self) -> Iterator[str]:
        if not self.items:
            return
        item, kind = self.items[-1], "response.function_call_arguments"
        if item["type"] == "function_call":
            for piece in pieces(item["arguments"]):
                yield self._item_event(f"{kind}.delta", delta=piece)
            yield self._item_event(f"{kind}.done", name=item["name"], arguments=item["arguments"])
        for part in item.get("content", ()):
            yield self._item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], **_extra(part))
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _item_event(self, kind: str, **data: object) -> str:
        return self._event(kind, output_index=len(self.items) - 1, item_id=self.items[-1]["id"], **data)

    def _event(self, kind: str, **data: object) -> str:
        return event({"type": kind, "sequence_number": next(self.numbers), **data}, kind)


def _extra(part: Json) -> Json:
    return {"logprobs": []} if part["type"] == "output_text" else {}


def read(data: Json) -> ResponseExchange:
    body = read_body(_Body, data)
    return ResponseExchange(_chat_request(body), bool(body.stream), body)


RESPONSES = Dialect(("/v1/responses",), read, error_json)
