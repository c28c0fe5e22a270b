"""The dialect of OpenAI's Responses API, ``POST /v1/responses``.

A request contains the whole conversation, or continues an answer by ``previous_response_id``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from agent_r1.core.messages import Message, Text, ToolCall, join_texts
from agent_r1.gateway.chat import (
    ChatAnswer,
    ChatRequest,
    Choice,
    Dialect,
    DialectRequest,
    FunctionTool,
    ImagePart,
    Json,
    Lenient,
    StreamPart,
    StreamStart,
    TextDelta,
    TextPart,
    event,
    ignored_arguments,
    read_body,
    read_call,
    read_parts,
    read_text,
    write_arguments,
)
from agent_r1.gateway.chat_completions import OpenAIBody, error_json, logprob_entries

LOGPROBS = "message.output_text.logprobs"
"""The entry of the argument ``include`` that requests log-probabilities."""

PREFIX = "resp_"


class _Image(ImagePart):
    type: Literal["input_image"]
    image_url: str

    @property
    def url(self) -> str:
        return self.image_url


_Content = str | list[Annotated[TextPart | _Image, Field(discriminator="type")]]


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


_Item = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")],
    Discriminator(lambda item: item.get("type", "message") if isinstance(item, dict) else None),
]


class _Tool(FunctionTool):
    type: Literal["function"]


class _Format(Lenient):
    type: Literal["text"]


class _TextOptions(Lenient):
    format: _Format | None = None
    verbosity: str | None = None


class _Body(OpenAIBody):
    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=0)
    text: _TextOptions | None = None
    include: list[str] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    # accepted, without an effect
    reasoning: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None


def _messages(items: Sequence[_Message | _Call | _Output | _Reasoning]) -> tuple[Message, ...]:
    messages: list[Message] = []
    pending: list[_Message | _Call | _Reasoning] = []  # adjacent items of the assistant are one message

    def finish_assistant() -> None:
        if pending:
            messages.append(_assistant_message(pending))
            pending.clear()

    for item in items:
        match item:
            case _Output():
                finish_assistant()
                messages.append(Message("tool", read_parts(item.output, "input"), call_id=item.call_id))
            case _Message() if item.role != "assistant":
                finish_assistant()
                role: Literal["user", "system"] = "user" if item.role == "user" else "system"
                messages.append(Message(role, read_parts(item.content, "input")))
            case _:
                pending.append(item)
    finish_assistant()
    return tuple(messages)


def _assistant_message(items: Sequence[_Message | _Call | _Reasoning]) -> Message:
    text = join_texts(read_text(item.content) for item in items if isinstance(item, _Message))
    calls: tuple[ToolCall, ...] = tuple(
        read_call(item.call_id, item.name, item.arguments, "input") for item in items if isinstance(item, _Call)
    )
    thoughts = [part.text for item in items if isinstance(item, _Reasoning) for part in item.content or item.summary]
    return Message("assistant", (Text(text),), calls, join_texts(thoughts) if thoughts else None)


def _chat_request(body: _Body) -> ChatRequest:
    tools = tuple(tool.spec() for tool in body.tools or ())
    previous = body.previous_response_id
    without_effect = {
        "parallel_tool_calls=false": body.parallel_tool_calls is False,
        "reasoning.effort": (body.reasoning or {}).get("effort"),
        "text.verbosity": body.text is not None and body.text.verbosity,
        "truncation=auto": body.truncation == "auto",
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


@dataclass(slots=True)
class ResponseRequest(DialectRequest):
    """A request to OpenAI's Responses API."""

    chat: ChatRequest
    streams: bool
    body: _Body
    created: int = field(default_factory=lambda: int(time.time()))
    # of the stream: the id of the answer, the items that have begun, and the number of events
    id: str = ""
    items: list[Json] = field(default_factory=list)
    num_events: int = 0

    def to_json(self, answer: ChatAnswer) -> Json:
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

    def events(self, part: StreamPart) -> Iterator[str]:
        match part:
            case StreamStart():
                self.id = part.id
                empty: Json = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
                for kind in ("response.created", "response.in_progress"):
                    yield self._event(kind, response={**self._head(part.id), **empty})
            case TextDelta():
                is_text = part.kind == "text"
                if not self.items or (is_text and self.items[-1]["type"] == "reasoning"):
                    yield from self._end_item()
                    item = _message_item(self.id, "", "in_progress", []) if is_text else _reasoning_item(self.id, "")
                    yield from self._begin_item(item)
                (content,) = self.items[-1]["content"]
                content["text"] += part.text
                kind = f"response.{content['type']}.delta"
                yield self._item_event(kind, content_index=0, delta=part.text, **_no_logprobs(content))
            case ChatAnswer():
                response = self.to_json(part)
                begun = [item["type"] for item in self.items]
                if begun:
                    self.items[-1] = next((i for i in response["output"] if i["type"] == begun[-1]), self.items[-1])
                    yield from self._end_item()
                for item in response["output"]:
                    if item["type"] not in begun:
                        yield from self._begin_item(item)
                        yield from self._end_item()
                yield self._event(f"response.{response['status']}", response=response)

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
            yield self._item_event(f"{kind}.delta", delta=item["arguments"])
            yield self._item_event(f"{kind}.done", name=item["name"], arguments=item["arguments"])
        for part in item.get("content", ()):
            done = f"response.{part['type']}.done"
            yield self._item_event(done, content_index=0, text=part["text"], **_no_logprobs(part))
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _item_event(self, kind: str, **data: object) -> str:
        return self._event(kind, output_index=len(self.items) - 1, item_id=self.items[-1]["id"], **data)

    def _event(self, kind: str, **data: object) -> str:
        self.num_events += 1
        return event({"type": kind, "sequence_number": self.num_events - 1, **data}, kind)

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


def _items(answer: ChatAnswer, choice: Choice) -> list[Json]:
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


def _no_logprobs(part: Json) -> Json:
    return {"logprobs": []} if part["type"] == "output_text" else {}  # a field that events of texts must have


def read(data: Json) -> ResponseRequest:
    body = read_body(_Body, data)
    return ResponseRequest(_chat_request(body), bool(body.stream), body)


RESPONSES = Dialect(("/v1/responses",), read, error_json)
