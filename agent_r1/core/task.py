"""Tasks: the problems that an agent has to solve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, to_messages, to_openai


@dataclass(frozen=True, slots=True, init=False)
class Task:
    """One problem. The constructor accepts messages, OpenAI-style dictionaries, or the text of one user message."""

    id: str  # unique in its task set
    messages: tuple[Message, ...]  # the opening of the conversation
    data: Mapping[str, Any]  # for tools and scorers, never shown to the agent
    split: str
    env: str  # the name of its environment if there are several, else ""

    def __init__(
        self,
        id: str,
        messages: str | Iterable[Message | Mapping[str, Any]],
        data: Mapping[str, Any] | None = None,
        split: str = "train",
        env: str = "",
    ) -> None:
        try:
            opening = to_messages(messages)
        except InvalidInput as error:  # an image that cannot be used
            raise InvalidInput(f"messages of task {id}: {error.what}", got=error.got, do=error.do) from error
        except (TypeError, ValueError) as error:
            do = 'give text, Messages, or dictionaries such as {"role": "user", "content": "..."}'
            raise InvalidInput(f"messages of task {id}", got=error, do=do) from error
        if not isinstance(data, Mapping | None):
            do = 'give a dictionary such as {"answers": ("Bruno",)}'
            raise InvalidInput(f"data of task {id!a}", got=f"an object of type {type(data).__name__}", do=do)
        for name, text in (("id", id), ("split", split), ("env", env)):
            check_text(f"{name} of task {id!a}", text)
        check_messages(f"messages of task {id!a}", opening)
        object.__setattr__(self, "id", id)  # the dataclass is frozen
        object.__setattr__(self, "messages", opening)
        object.__setattr__(self, "data", {} if data is None else data)
        object.__setattr__(self, "split", split)
        object.__setattr__(self, "env", env)

    @property
    def env_split(self) -> str:
        """The split, such as "test"; with several environments that of its environment, such as "calc/test"."""
        return f"{self.env}/{self.split}" if self.env else self.split


def check_text(what: str, text: object) -> None:
    """Raise InvalidInput about ``what`` if ``text`` is not a str, or contains a lone surrogate (half a character)."""
    if not isinstance(text, str):
        raise InvalidInput(what, got=f"an object of type {type(text).__name__}", do="give text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(what, got=f"half a character, {text[error.start]!a}", do="remove it") from None


def check_messages(what: str, messages: Iterable[Message]) -> None:
    """Raise InvalidInput about ``what`` if a text, a thought or a call of a message has half a character."""
    for message in messages:
        check_text(what, message.text)
        if message.reasoning is not None:
            check_text(what, message.reasoning)
        if message.calls:
            calls = [(call.name, call.raw, dict(call.arguments or {})) for call in message.calls]
            check_text(what, json.dumps(calls, ensure_ascii=False, default=str))


AgentFunction = Callable[[str, str, Task], Awaitable[object] | object]
"""An agent program of a user: ``run(base_url, api_key, task)``, sync or async, returns its answer or None.

At ``base_url``, the policy answers requests in the formats of OpenAI and Anthropic that have the key ``api_key``."""


def hash_tasks(tasks: Iterable[Task]) -> str:
    """Return the sha256 of a sequence of tasks. The order of the tasks matters."""
    total = hashlib.sha256()
    for task in tasks:
        try:
            data = _to_json(task.data)
        except RecursionError:  # the task's data contains itself
            data = sorted(map(str, task.data))
        messages = [to_openai(message.with_images_as_text()) for message in task.messages]
        images = [image.sha256 for message in task.messages for image in message.images]
        env = [{"env": task.env}] if task.env else []
        content = [task.id, task.split, messages, data, *images, *env]
        total.update(_dump(content).encode() + b"\n")
    return total.hexdigest()


_dump = json.JSONEncoder(sort_keys=True).encode


def _to_json(value: object) -> object:
    match value:
        case str() | None | bool() | float():
            return value
        case int():
            return hex(value)  # Python refuses to write very long integers in decimal
        case list() | tuple():  # before Mapping, an abstract class, whose check is slow
            return [_to_json(item) for item in value]
        case bytes() | bytearray():
            return value.hex()
        case dict() | Mapping():
            return {_dump(_to_json(key)): _to_json(item) for key, item in value.items()}
        case set() | frozenset():
            return sorted(_dump(_to_json(item)) for item in value)
    if is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    return type(value).__qualname__
