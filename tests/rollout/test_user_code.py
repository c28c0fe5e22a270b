"""What somebody else's code raises becomes a failure of ours; what it gives is looked at before it is used."""

from __future__ import annotations

import asyncio
import json
import re
from fractions import Fraction
from typing import Any

import pytest

from agent_r1.core.environment import Transition
from agent_r1.core.messages import Media, Message, Text, ToolCall
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Unscored
from agent_r1.rollout.user_code import LONGEST, as_messages, as_rewards, as_transition, boundary, objections, told


class Panic(BaseException):
    """As other languages' libraries raise."""


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), RecursionError("deep"), TimeoutError("own"), Panic("in Rust")]
)
def test_what_is_raised_leaves_as_our_failure_with_its_reason(error: BaseException) -> None:
    with pytest.raises(LookupError, match=f"{type(error).__name__}: ") as caught, boundary(LookupError):
        raise error
    assert caught.value.__cause__ is error


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words for it")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_failure_is_told_in_one_line_with_the_place_in_the_users_own_code() -> None:
    said = told(raised(ValueError("no\n such page")))
    assert re.fullmatch(r"ValueError: no such page \(test_boundary.py:\d+, in raised\)", said)
    try:
        json.loads("[")
    except ValueError as error:  # raised in Python's own files
        assert re.search(r"\(test_boundary.py:\d+, in test_\w+\)$", told(error))
    assert told(KeyError("never raised")) == "KeyError: 'never raised'"
    assert told(Unreadable()) == "Unreadable: its text cannot be shown"
    assert len(told(ValueError("x" * 10**6))) == len("ValueError: ") + LONGEST
    assert (
        told(ExceptionGroup("2 errors", [ExceptionGroup("1 error", [KeyError("a")]), OSError("b")])) == "KeyError: 'a'"
    )


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_is_not_taken_for_a_failure(kind: type[BaseException]) -> None:
    with pytest.raises(kind), boundary(LookupError):
        raise kind


async def letting_out_its_own_cancellation() -> None:
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


def test_a_cancellation_that_nobody_asked_for_is_a_failure_and_one_from_outside_passes() -> None:
    async def stray() -> str:
        try:
            with boundary(LookupError):
                await letting_out_its_own_cancellation()
        except LookupError as failure:
            return str(failure)
        return "nothing"

    async def outside() -> Any:
        async def waiting() -> None:
            with boundary(LookupError):
                await asyncio.sleep(60)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    async def past_a_deadline() -> None:
        async with asyncio.timeout(0.01):
            with boundary(LookupError):
                await asyncio.sleep(60)

    assert asyncio.run(stray()).startswith("CancelledError")
    assert isinstance(asyncio.run(outside())[0], asyncio.CancelledError)
    with pytest.raises(TimeoutError):
        asyncio.run(past_a_deadline())


GOOD = Transition(
    (Message.tool("page", "call"), Message("user", (Media("ab", "image/png"),))),
    rewards={"found": 1},
    end="terminal",
    results=(ToolResult((Text("page"),), ok=True, data=object()),),
    call_rewards=({"found": True}, {}),
)


def test_a_good_transition_comes_back_with_its_rewards_as_numbers() -> None:
    taken = as_transition(GOOD)
    assert (taken.messages, taken.end, taken.results) == (GOOD.messages, "terminal", GOOD.results)
    assert taken.rewards == {"found": 1.0} and taken.call_rewards == ({"found": 1.0}, {})
    assert type(taken.rewards["found"]) is float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "the step gave None"),
        ({"messages": ()}, "type dict, and no Transition"),
        (Transition(({"role": "tool"},)), "type dict, and no Message"),  # type: ignore[arg-type]
        (Transition((Message("tool", (Text(b"x"),)),)), "type bytes where text belongs"),  # type: ignore[arg-type]
        (Transition((Message("tool", ("x",)),)), "type str where text belongs"),  # type: ignore[arg-type]
        (Transition((), results=("x",)), "and no ToolResult"),  # type: ignore[arg-type]
        (Transition((), rewards={"found": "1"}), "reward found is an object of type str"),  # type: ignore[dict-item]
        (Transition((), call_rewards=({"found": None},)), "reward found is None"),  # type: ignore[dict-item]
        (Transition((), end=False), "False as its end"),  # type: ignore[arg-type]
        (Transition((), end="done"), "'done' as its end"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult((), False, {"code": 500}),)), "error is an object of type dict"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult((), False, OSError()),)), "error is an object of type OSError"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult((), None),)), "ok is None, and no bool"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult((), True, seconds=None),)), "seconds are None"),  # type: ignore[arg-type]
        (Transition((), results=(ToolResult(None, True),)), "parts are None, and no tuple"),  # type: ignore[arg-type]
        (Transition((Message("actor", ()),)), "role is 'actor'"),  # type: ignore[arg-type]
        (Transition((Message("tool", (), reasoning=b"x"),)), "reasoning is an object of type bytes"),  # type: ignore[arg-type]
        (Transition((Message("tool", (), call_id=7),)), "call_id is an object of type int"),  # type: ignore[arg-type]
        (Transition((Message("assistant", (), ({"name": "x"},)),)), "no tuple of Calls"),  # type: ignore[arg-type]
        (Transition((Message("assistant", (), (ToolCall("c", "x", "{}", ""),)),)), "no tuple of Calls"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_transition_is_named(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_transition(given)


def test_a_start_is_messages() -> None:
    assert as_messages([Message.user("x")]) == (Message.user("x"),)
    with pytest.raises(TypeError, match="and no Message"):
        as_messages(["x"])


def test_a_reward_is_a_number_or_one_per_turn_or_none() -> None:
    given = {"a": True, "b": None, "c": (1, 0.5), "d": Fraction(1, 2), "e": Unscored("KeyError: 'gold'")}
    assert as_rewards(given) == {"a": 1.0, "b": None, "c": (1.0, 0.5), "d": 0.5, "e": None}
    assert list(objections(given)) == ["reward e could not be scored: KeyError: 'gold'"]
    for wrong in ("1.0", [1.0], (1.0, "x"), 1j):
        with pytest.raises(TypeError, match="reward em is"):
            as_rewards({"em": wrong})
