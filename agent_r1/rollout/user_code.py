"""Isolation of user code: its exceptions become failures with a reason, and its return values are validated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import get_args

from agent_r1.core.environment import Transition
from agent_r1.core.messages import Message, RoleName, ToolCall, ToolResult, from_openai
from agent_r1.core.trajectory import Rewards, RewardValue, Unscored
from agent_r1.tools.execution import current_task, is_user_error, user_code_location
from agent_r1.tools.tool_errors import describe_type, part_errors, validation_errors

ENDS, ROLES = (None, "terminal", "truncated"), get_args(RoleName)

MAX_ERROR_CHARACTERS = 500
"""The maximum number of characters of an exception's text, which is stored with each failed attempt."""


def format_error(error: BaseException) -> str:
    """Return an exception in one line, such as ``ValueError: no such page (env.py:12, in find)``."""
    while isinstance(error, BaseExceptionGroup):  # the text of a group gives only the number of exceptions
        error = error.exceptions[0]
    try:
        text = " ".join(str(error).split())[:MAX_ERROR_CHARACTERS]
    except Exception:  # the method __str__ of the exception can be user code
        text = "its text cannot be shown"
    return f"{type(error).__name__}: {text}{user_code_location(error)}"


@contextmanager
def isolate(failure: Callable[[str], Exception]) -> Iterator[None]:
    """Convert each exception of the ``with`` block to ``failure(reason)``, but no interrupt and no cancellation."""
    task = current_task()
    try:
        yield
    except BaseException as error:
        if not is_user_error(error, task):
            raise
        raise failure(format_error(error)) from error


def validate_transition(given: object) -> Transition:
    """Convert the result of an environment's step to a valid Transition, or raise TypeError with the reason."""
    if not isinstance(given, Transition):
        raise TypeError(f"the step returned {describe_type(given)}, not a Transition")
    if given.end not in ENDS:
        raise TypeError(f"the step returned end={given.end!r}, which is not one of {ENDS}")
    for result in given.results:
        if not isinstance(result, ToolResult):
            raise TypeError(f"the step returned {describe_type(result)} in its results, not a ToolResult")
        for problem in validation_errors(result):
            raise TypeError(f"the step returned a ToolResult that cannot be used: {problem}")
    return Transition(
        validate_messages(given.messages),
        _numbers(given.rewards),
        given.end,
        tuple(given.results),
        tuple(map(_numbers, given.call_rewards)),
    )


def validate_messages(given: Iterable[object]) -> tuple[Message, ...]:
    """Return messages, also OpenAI-style dictionaries, as valid Messages, or raise TypeError with the reason."""
    messages = []
    for item in given:
        try:
            message = from_openai({str(k): v for k, v in item.items()}) if isinstance(item, Mapping) else item
        except ValueError as error:
            raise TypeError(f"the environment gave {error}") from error
        if not isinstance(message, Message):
            raise TypeError(f"the environment gave {describe_type(message)}, not a Message")
        for problem in _message_errors(message):
            raise TypeError(f"the environment gave a Message that cannot be used: {problem}")
        messages.append(message)
    return tuple(messages)


def validate_rewards(given: Mapping[str, object]) -> Rewards:
    """Convert the rewards of one trajectory, or raise TypeError. Unscored ones become None."""
    rewards: dict[str, RewardValue] = {}
    for name, value in given.items():
        if isinstance(value, tuple):
            rewards[str(name)] = tuple(_number(name, item) for item in value)
        else:
            rewards[str(name)] = None if value is None or isinstance(value, Unscored) else _number(name, value)
    return rewards


def _numbers(given: Mapping[str, object]) -> dict[str, float]:
    return {str(name): _number(name, value) for name, value in given.items()}


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"reward {name} is {describe_type(value)}, not a number")
    return float(value)


def _message_errors(message: Message) -> Iterator[str]:
    yield from part_errors(message.parts)
    if message.role not in ROLES:
        yield f"its role is {message.role!r}, which is not one of {ROLES}"
    for name, value in (("reasoning", message.reasoning), ("call_id", message.call_id)):
        if not isinstance(value, str | None):
            yield f"its {name} is {describe_type(value)}, neither text nor None"
    are_calls = isinstance(message.calls, tuple) and all(
        isinstance(call, ToolCall)
        and all(isinstance(text, str) for text in (call.id, call.name, call.raw))
        and isinstance(call.arguments, Mapping | None)
        and isinstance(call.error, str | None)
        for call in message.calls
    )
    if not are_calls:
        yield "its calls are not a tuple of ToolCalls whose id, name and raw are text"
