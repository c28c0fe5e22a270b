"""Where somebody else's code begins: what it raises becomes a failure of ours, and what it gives is looked at."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import get_args

from agent_r1.core.environment import Transition
from agent_r1.core.messages import Message, RoleName, ToolCall
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Rewards, RewardValue, Unscored
from agent_r1.tools.tool_errors import flaws, kind_of, part_flaws

OURS, PYTHON = Path(__file__).parents[1], Path(os.__file__).parent

ENDS, ROLES = (None, "terminal", "truncated"), get_args(RoleName)

LONGEST = 500
"""Characters of an exception's text that are kept: a reason is stored with each attempt."""


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the user's own code that it comes from; of a group the first.

    Example:
        ValueError: no such page (world.py:12, in find)
    """
    while isinstance(error, BaseExceptionGroup):  # it says nothing but how many there are
        error = error.exceptions[0]
    return f"{type(error).__name__}: {_text(error)}{_where(error)}"


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:LONGEST]
    except Exception:  # its own __str__ is somebody else's code too
        return "its text cannot be shown"


def _where(error: BaseException) -> str:
    """The innermost line that is neither ours, nor Python's, nor an installed package's."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        known = file.is_relative_to(OURS) or file.is_relative_to(PYTHON) or "site-packages" in file.parts
        if not known and file.is_file():
            return f" ({file.name}:{line}, in {frame.f_code.co_name})"
    return ""


@contextmanager
def boundary(failure: Callable[[str], Exception]) -> Iterator[None]:
    """What is raised inside leaves as ``failure(reason)``; only a cancellation from outside and an interrupt pass.

    That may be no Exception: other languages' libraries raise their panics as a BaseException. A cancellation that
    nobody asked for is the code's own: some task inside it was cancelled, and it let that out.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise failure(told(error)) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise failure(told(error)) from error


def as_transition(given: object) -> Transition:
    """What an environment's step gave, if it can be shown to a policy, learned from and written down.

    Raises TypeError that says what cannot: found out later, it would end the run and not the episode.
    """
    if not isinstance(given, Transition):
        raise TypeError(f"the step gave {kind_of(given)}, and no Transition")
    if given.end not in ENDS:
        raise TypeError(f"the step gave {given.end!r} as its end, and none of {ENDS}")
    for result in given.results:
        if not isinstance(result, ToolResult):
            raise TypeError(f"the step gave {kind_of(result)} among its results, and no ToolResult")
        for flaw in flaws(result):
            raise TypeError(f"the step gave a ToolResult that cannot be used: {flaw}")
    return Transition(
        as_messages(given.messages),
        _numbers(given.rewards),
        given.end,
        tuple(given.results),
        tuple(map(_numbers, given.call_rewards)),
    )


def as_messages(given: Sequence[object]) -> tuple[Message, ...]:
    """Messages that an environment gave. Raises TypeError as :func:`as_transition` does."""
    messages = []
    for message in given:
        if not isinstance(message, Message):
            raise TypeError(f"it gave {kind_of(message)}, and no Message")
        for flaw in _message_flaws(message):
            raise TypeError(f"it gave a Message that cannot be used: {flaw}")
        messages.append(message)
    return tuple(messages)


def as_rewards(given: Mapping[str, object]) -> Rewards:
    """The rewards that a scorer gave a trajectory; None is what it could not score. Raises TypeError where one is
    neither a number, nor one number per turn, nor Unscored or None."""
    return {str(name): _reward(str(name), value) for name, value in given.items()}


def objections(given: Mapping[str, object]) -> Iterator[str]:
    """Why each reward that a scorer could not give is missing, as far as it says so."""
    for name, value in given.items():
        if isinstance(value, Unscored):
            yield f"reward {name} could not be scored: {value.reason}"


def _reward(name: str, value: object) -> RewardValue:
    if isinstance(value, tuple):
        return tuple(_number(name, item) for item in value)
    return None if value is None or isinstance(value, Unscored) else _number(name, value)


def _numbers(given: Mapping[str, object]) -> dict[str, float]:
    return {str(name): _number(str(name), value) for name, value in given.items()}


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"reward {name} is {kind_of(value)}, and no number")
    return float(value)


def _message_flaws(message: Message) -> Iterator[str]:
    yield from part_flaws(message.parts)
    if message.role not in ROLES:
        yield f"its role is {message.role!r}, and none of {ROLES}"
    for what, value in (("reasoning", message.reasoning), ("call_id", message.call_id)):
        if not isinstance(value, str | None):
            yield f"its {what} is {kind_of(value)}, and neither text nor None"
    if not isinstance(message.calls, tuple) or not all(map(_is_call, message.calls)):
        yield "its calls are no tuple of Calls whose id, name and raw are text"


def _is_call(call: object) -> bool:
    return (
        isinstance(call, ToolCall)
        and all(isinstance(text, str) for text in (call.id, call.name, call.raw))
        and isinstance(call.arguments, Mapping | None)
        and isinstance(call.error, str | None)
    )
