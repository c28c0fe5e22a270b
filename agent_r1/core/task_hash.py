"""Hashes of tasks: equal tasks have equal hashes, in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass

from agent_r1.core.messages import to_openai
from agent_r1.core.task import Task


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
        content = [task.id, task.split, messages, data, *images]
        total.update(_dump(content).encode() + b"\n")
    return total.hexdigest()


_dump = json.JSONEncoder(sort_keys=True).encode


def _to_json(value: object) -> object:
    """Convert a value to JSON types. An object of an unknown type becomes the name of its type."""
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
