"""Where somebody else's code begins: what it raises becomes a failure of ours, and what it gives is looked at."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path

from agent_r1.core.messages import Media, Message, Text
from agent_r1.core.task import ToolResult
from agent_r1.core.trajectory import Rewards, RewardValue, Unscored
from agent_r1.core.world import Transition

OURS, PYTHON = Path(__file__).parents[1], Path(os.__file__).parent

LONGEST = 500
"""Characters of an exception's text that are kept: a reason is stored with each attempt."""


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the user's own code that it comes from.

    Example:
        ValueError: no such page (world.py:12, in find)
    """
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
    """What is raised inside leaves as ``failure(reason)``; only a cancellation from outside passes through.

    A cancellation that nobody asked for is the code's own: some task inside it was cancelled, and it let that out.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise failure(told(error)) from error
    except (Exception, SystemExit) as error:
        raise failure(told(error)) from error


def as_transition(given: object) -> Transition:
    """What an environment's step gave, if it can be shown to a policy, learned from and written down.

    Raises TypeError that says what cannot: found out later, it would end the run and not the episode.
    """
    if not isinstance(given, Transition):
        raise TypeError(f"the step gave {_kind(given)}, and no Transition")
    for result in given.results:
        if not isinstance(result, ToolResult):
            raise TypeError(f"the step gave {_kind(result)} among its results, and no ToolResult")
        _check_parts(result.parts)
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
            raise TypeError(f"it gave {_kind(message)}, and no Message")
        _check_parts(message.parts)
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
        raise TypeError(f"reward {name} is {_kind(value)}, and no number")
    return float(value)


def _check_parts(parts: Sequence[object]) -> None:
    for part in parts:
        if not isinstance(part, Media) and not (isinstance(part, Text) and isinstance(part.text, str)):
            raise TypeError(f"it gave {_kind(part.text if isinstance(part, Text) else part)} where text belongs")


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
