"""The protocol of environment workers: the bodies of requests and answers, as JSON.

    GET    /health                       WorkerDescription
    POST   /episodes                     OpenRequest -> Opened or ModelQuery
    POST   /episodes/{episode}/step      StepRequest -> Stepped or ModelQuery
    POST   /episodes/{episode}/answer    ModelAnswer -> Opened or Stepped, or another ModelQuery
    DELETE /episodes/{episode}

If an environment queries a model of the run, the worker answers with a ModelQuery. The run then sends a ModelAnswer,
and the worker continues with the request. Status 422 means that the environment raised an error.

Messages are encoded as in the database of a run (``store.rows``). The files of images are in a separate field.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from agent_r1.core.environment import Transition
from agent_r1.core.messages import Action, ContentPart, Image, Message, ToolResult
from agent_r1.core.task import Task, hash_tasks
from agent_r1.store.rows import (
    MAX_DEPTH,
    MAX_INTEGER_BITS,
    decode_action,
    decode_messages,
    decode_result,
    decode_value,
    encode_action,
    encode_messages,
    encode_result,
    encode_value,
)

MAX_BODY = 256 * 2**20
"""The largest number of bytes in the body of a request."""

ENVIRONMENT_FAILED = 422
"""The HTTP status of an answer if the environment raised an error."""

Images = dict[str, str]
"""The files of images in base64, by the sha256 of the file."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerDescription(_Body):
    """The environments of a worker, or of a run. They must agree; a hash that only one has is not compared."""

    version: str
    taskset: str
    fingerprints: dict[str, str]  # hashes of the "tasks", the "tools", and of local data, such as "corpus"


class TaskContent(_Body):
    id: str
    messages: list[Any]
    data: Any  # JSON values and tuples
    split: str
    env: str = ""


class TaskReference(_Body):
    """A reference to a task whose data cannot be sent. The worker must have a task with this id, split and hash."""

    id: str
    split: str
    sha256: str


class OpenRequest(_Body):
    environment: str
    task: TaskContent | TaskReference
    attempt: tuple[str, str, int, int, int]  # the fields of the AttemptId
    seed: int
    seconds: float | None  # how long the attempt can take from now on; None: no limit
    models: tuple[str, ...]  # the roles of the models that the environment can query
    images: Images


class Opened(_Body):
    kind: Literal["opened"] = "opened"
    episode: str
    start: list[Any]
    images: Images


class StepRequest(_Body):
    action: list[Any]
    images: Images


class Stepped(_Body):
    kind: Literal["stepped"] = "stepped"
    messages: list[Any]
    rewards: dict[str, float]
    end: Literal["terminal", "truncated"] | None
    results: list[Any]
    call_rewards: list[dict[str, float]]
    images: Images


class ModelQuery(_Body):
    """A query that the environment sends to a model of the run."""

    kind: Literal["query"] = "query"
    episode: str
    query: int  # the index of the query, also in its ModelAnswer
    role: str  # of the model, such as "user"
    messages: list[Any]
    images: Images


class ModelAnswer(_Body):
    """The answer of a model to a ModelQuery. ``messages`` has one message, or none after an error."""

    query: int
    messages: list[Any]
    images: Images
    error: str | None = None


def images_of(messages: Iterable[Message], results: Iterable[ToolResult] = ()) -> Images:
    parts = [part for message in messages for part in message.parts]
    parts += (part for result in results for part in result.parts)
    return {part.sha256: base64.b64encode(part.data).decode() for part in parts if isinstance(part, Image)}


def with_images(messages: Iterable[Message], images: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the messages with the files of their images."""
    return tuple(replace(message, parts=_filled(message.parts, images)) for message in messages)


def _filled(parts: Sequence[ContentPart], images: Mapping[str, str]) -> tuple[ContentPart, ...]:
    return tuple(
        replace(part, data=base64.b64decode(images[part.sha256])) if isinstance(part, Image) else part for part in parts
    )


def encode_task(task: Task) -> TaskContent | TaskReference:
    """Return the task as JSON values, or a reference to the worker's own task if the data cannot be sent."""
    data = dict(task.data)
    try:
        check_sendable("the data", data)
    except TypeError:
        return TaskReference(id=task.id, split=task.env_split, sha256=hash_tasks([task]))
    messages = encode_messages(task.messages)
    return TaskContent(id=task.id, messages=messages, data=encode_value(data), split=task.split, env=task.env)


def decode_task(content: TaskContent, images: Images) -> Task:
    messages = with_images(decode_messages(content.messages), images)
    return Task(content.id, messages, decode_value(content.data), content.split, content.env)


def encode_step(action: Action) -> StepRequest:
    return StepRequest(action=encode_action(action), images=images_of([action.message]))


def decode_step(request: StepRequest) -> Action:
    action = decode_action(request.action)
    return replace(action, message=with_images([action.message], request.images)[0])


def encode_transition(transition: Transition) -> Stepped:
    """Return a transition as JSON values. Raise TypeError if a tool result has data that cannot be sent."""
    for result in transition.results:
        check_sendable("the data of a tool result", result.data)
    return Stepped(
        messages=encode_messages(transition.messages),
        rewards=dict(transition.rewards),
        end=transition.end,
        results=[encode_result(result) for result in transition.results],
        call_rewards=[dict(rewards) for rewards in transition.call_rewards],
        images=images_of(transition.messages, transition.results),
    )


def decode_transition(answer: Stepped) -> Transition:
    results = map(decode_result, answer.results)
    return Transition(
        with_images(decode_messages(answer.messages), answer.images),
        answer.rewards,
        answer.end,
        tuple(replace(result, parts=_filled(result.parts, answer.images)) for result in results),
        tuple(answer.call_rewards),
    )


def check_sendable(what: str, value: object, depth: int = 0) -> None:
    """Raise TypeError about ``what`` if encoding and decoding a value would not give an equal value.

    Numbers, texts, None, and lists, tuples and dictionaries of these values can be sent.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise TypeError(f"{what} has an integer of {value.bit_length()} bits; the limit is {MAX_INTEGER_BITS}")
    if value is None or isinstance(value, str | bool | int | float):
        return
    if not isinstance(value, list | tuple | Mapping):
        do = "use numbers, texts, lists, tuples and dictionaries"
        raise TypeError(f"{what} has an object of type {type(value).__name__}, which cannot be sent to a worker: {do}")
    if depth == MAX_DEPTH:
        raise TypeError(f"{what} is nested deeper than {MAX_DEPTH} levels")
    for item in (*value.keys(), *value.values()) if isinstance(value, Mapping) else value:
        check_sendable(what, item, depth + 1)


TOKEN_VARIABLE = "AGENT_R1_WORKER_TOKEN"
"""The environment variable with the token of the workers. A run never stores the token."""


class EnvironmentConfig(BaseModel):
    """The workers that run the environments of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    workers: tuple[str, ...] = ()
    """Environment workers, separated by commas, such as http://10.0.0.5:8200. Start a worker with 'agent-r1 serve-env'.
    Empty: environments and tools run in the process of the run."""

    episodes: int = Field(default=256, ge=1)
    """Maximum number of episodes of one worker at the same time. Further attempts wait. The waiting time counts
    toward the time limit of an attempt, episode_seconds.
    """

    @field_validator("workers")
    @classmethod
    def _require_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an address: give one such as http://127.0.0.1:8200")
            if "@" in url:  # a run stores its settings, but must not store credentials
                raise ValueError(f"give addresses without user and password, and the token in {TOKEN_VARIABLE}")
        if len(set(value)) < len(value):
            raise ValueError("a worker is named twice")
        return value

    @field_validator("episodes")
    @classmethod
    def _require_workers(cls, value: int, info: ValidationInfo) -> int:
        if value != cls.model_fields["episodes"].default and not info.data.get("workers"):
            raise ValueError("it has an effect only with environment.workers: give that, or leave it out")
        return value
