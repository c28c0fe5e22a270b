"""Isolation of user code: its exceptions are converted, its return values validated."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from fractions import Fraction
from typing import Any

import pytest

from agent_r1.core.environment import Transition
from agent_r1.core.messages import Image, Message, Text, ToolCall, ToolResult
from agent_r1.core.trajectory import Unscored
from agent_r1.rollout.user_code import (
    MAX_ERROR_CHARACTERS,
    format_error,
    isolate,
    validate_messages,
    validate_rewards,
    validate_transition,
)


class Panic(BaseException):
    """Like the panics of native libraries."""


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        SystemExit(3),
        RecursionError("deep"),
        TimeoutError("own"),
        Panic("in Rust"),
        GeneratorExit("x"),
    ],
)
def test_exceptions_are_converted_with_their_reason(error: BaseException) -> None:
    with pytest.raises(LookupError, match=f"{type(error).__name__}: ") as caught, isolate(LookupError):
        raise error
    assert caught.value.__cause__ is error


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_is_formatted_in_one_line_with_the_line_of_user_code() -> None:
    text = format_error(raised(ValueError("no\n such page")))
    assert re.fullmatch(r"ValueError: no such page \(test_user_code.py:\d+, in raised\)", text)
    try:
        json.loads("[")
    except ValueError as error:  # raised in Python's own files
        assert re.search(r"\(test_user_code.py:\d+, in test_\w+\)$", format_error(error))
    assert format_error(KeyError("never raised")) == "KeyError: 'never raised'"
    assert format_error(Unreadable()) == "Unreadable: its text cannot be shown"
    assert len(format_error(ValueError("x" * 10**6))) == len("ValueError: ") + MAX_ERROR_CHARACTERS
    assert (
        format_error(ExceptionGroup("2 errors", [ExceptionGroup("1 error", [KeyError("a")]), OSError("b")]))
        == "KeyError: 'a'"
    )


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt), isolate(LookupError):
        signal.raise_signal(signal.SIGINT)


def test_a_coroutine_that_its_loop_closes_ends_without_a_failure() -> None:
    async def waiting() -> None:
        with isolate(LookupError):
            await asyncio.get_running_loop().create_future()

    async def left_behind() -> Any:
        coroutine = waiting()
        coroutine.send(None)
        return coroutine

    asyncio.run(left_behind()).close()  # a GeneratorExit that nobody raised


async def raise_cancelled_error() -> None:
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


def test_only_a_cancellation_from_outside_passes() -> None:
    async def stray() -> str:
        try:
            with isolate(LookupError):
                await raise_cancelled_error()
        except LookupError as failure:
            return str(failure)
        return "nothing"

    async def outside() -> Any:
        async def waiting() -> None:
            with isolate(LookupError):
                await asyncio.sleep(60)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    async def past_a_deadline() -> None:
        async with asyncio.timeout(0.01):
            with isolate(LookupError):
                await asyncio.sleep(60)

    assert asyncio.run(stray()).startswith("CancelledError")
    assert isinstance(asyncio.run(outside())[0], asyncio.CancelledError)
    with pytest.raises(TimeoutError):
        asyncio.run(past_a_deadline())


GOOD = Transition(
    (Message.tool("page", "call"), Message("user", (Image("ab", "image/png"),))),
    rewards={"found": 1},
    end="terminal",
    results=(ToolResult((Text("page"),), ok=True, data=object()),),
    call_rewards=({"found": True}, {}),
)


def test_a_valid_transition_is_returned_with_float_rewards() -> None:
    taken = validate_transition(GOOD)
    assert (taken.messages, taken.end, taken.results) == (GOOD.messages, "terminal", GOOD.results)
    assert taken.rewards == {"found": 1.0} and taken.call_rewards == ({"found": 1.0}, {})
    assert type(taken.rewards["found"]) is float


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (None, "the step returned None"),
        ({"messages": ()}, "type dict, not a Transition"),
        (Transition(({"content": "x"},)), "a message with the role None"),  # type: ignore[arg-type]
        (Transition((Message("tool", (Text(b"x"),)),)), "type bytes where text belongs"),  # type: ignore[arg-type]
        (Transition((), results=("x",)), "not a ToolResult"),  # type: ignore[arg-type]
        (Transition((), rewards={"found": "1"}), "reward found is an object of type str"),  # type: ignore[dict-item]
        (Transition((), end=False), "end=False"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult((), False, {"code": 500}),)), "error is an object of type dict"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult(None, True),)), "parts are None, not a tuple"),  # type: ignore[arg-type]
        (Transition((Message("actor", ()),)), "role is 'actor'"),  # type: ignore[arg-type]
        (Transition((Message("tool", (), reasoning=b"x"),)), "reasoning is an object of type bytes"),  # type: ignore[arg-type]
        (Transition((Message("assistant", (), (ToolCall("c", "x", "{}", ""),)),)), "not a tuple of ToolCalls"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_transition_is_refused_with_the_reason(given: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        validate_transition(given)


def test_opening_messages_are_validated() -> None:
    assert validate_messages([Message.user("x")]) == (Message.user("x"),)
    with pytest.raises(TypeError, match="not a Message"):
        validate_messages(["x"])


def test_a_reward_is_a_number_a_number_per_turn_or_none() -> None:
    given = {"a": True, "b": None, "c": (1, 0.5), "d": Fraction(1, 2), "e": Unscored("KeyError: 'gold'")}
    assert validate_rewards(given) == {"a": 1.0, "b": None, "c": (1.0, 0.5), "d": 0.5, "e": None}
    for wrong in ("1.0", [1.0], (1.0, "x"), 1j):
        with pytest.raises(TypeError, match="reward em is"):
            validate_rewards({"em": wrong})
