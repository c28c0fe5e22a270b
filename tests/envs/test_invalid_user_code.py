"""Arbitrary calls of a policy and arbitrary results of a tool lead to feedback, never to an exception."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import BaseModel

from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.tools.function_tool import tool
from agent_r1.tools.tool_errors import ToolErrorKind

MAX_OUTPUT = 300
PER_ACTION = 25
relaxed = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))  # x 25 = 500 cases


class Filter(BaseModel):
    field: str
    low: float = 0.0


@tool
def search(
    query: str,
    k: int = 3,
    order: Literal["up", "down"] = "up",
    where: Filter | None = None,
    more: dict[str, Any] | None = None,
) -> str:
    """Search."""
    return f"{query} {k} {order}"


@tool(batch=lambda calls: [call["title"] for call in calls])
def read(title: str) -> str:
    """Read."""
    return title


def step(env: ToolEnv, *calls: ToolCall) -> Transition:
    async def run() -> Transition:
        episode = await env.open(Task("t", (Message.user("q"),)), RolloutContext(AttemptId("r", "t", 0, 0), 0))
        return await episode.step(Action(Message.assistant("", calls), ""))

    return asyncio.run(run())


def check(calls: tuple[ToolCall, ...], transition: Transition) -> None:
    assert [message.call_id for message in transition.messages] == [call.id for call in calls]
    for message, result in zip(transition.messages, transition.results, strict=True):
        assert message.role == "tool"
        assert message.parts == result.parts
        assert result.ok == (result.error is None)
        assert len(message.text) <= MAX_OUTPUT + 40
        message.text.encode("utf-8")  # no lone surrogates: a tokenizer could not take them
        assert message.text or result.ok


any_text = st.text(st.characters(), max_size=30)  # includes NUL and lone surrogates
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["search", "read"]) | st.sampled_from(["serach", "Search", "", "read "]) | any_text
likely_keys = st.sampled_from(["query", "k", "order", "where", "more", "title", "p0", "model_config", "self"])
arguments = (
    st.dictionaries(likely_keys | any_text, json_values, max_size=4)
    | st.builds(lambda query, value: {"query": query, "k": value}, any_text, json_values)
    | st.builds(lambda title: {"title": title}, any_text)
)
well_formed = st.builds(ToolCall, any_text, names, arguments, any_text)
malformed = st.builds(ToolCall, any_text, names, st.none(), any_text, st.none() | any_text)
not_an_object = st.builds(ToolCall, any_text, names, json_values, any_text)
env = ToolEnv([search, read], max_output=MAX_OUTPUT)


@relaxed
@given(st.lists(well_formed | malformed | not_an_object, min_size=1, max_size=PER_ACTION * 2).map(tuple))
def test_arbitrary_calls_get_one_result_each(calls: tuple[ToolCall, ...]) -> None:
    check(calls, step(env, *calls))


@relaxed
@given(st.data())
def test_mutations_of_a_valid_call_get_a_result(data: st.DataObject) -> None:
    valid = json.dumps({"query": "who rules Alba?", "k": 2, "order": "up", "where": {"field": "x", "low": 1.5}})
    calls = []
    for index in range(PER_ACTION):
        position = data.draw(st.integers(0, len(valid)))
        text = (
            valid[:position]
            + data.draw(st.text('{}[]":,0x\\', max_size=3))
            + valid[position + data.draw(st.integers(0, 3)) :]
        )
        try:
            calls.append(ToolCall(f"c{index}", "search", json.loads(text), text))
        except ValueError as error:
            calls.append(ToolCall(f"c{index}", "search", None, text, str(error)))
    check(tuple(calls), step(env, *calls))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


awkward = st.sampled_from(
    [
        None,
        float("nan"),
        float("inf"),
        b"\xff\xfe",
        "\ud800",
        "a\x00b",
        nested(100_000),
        "x" * 1_000_000,
        object(),
        {1, 2},
        Exception,
    ]
)
returned = awkward | json_values | any_text | st.builds(lambda text: ToolResult((Text(text),), True), json_values)  # type: ignore[arg-type]
raised = st.sampled_from(
    [ValueError, KeyError, RecursionError, MemoryError, SystemExit, StopIteration, GeneratorExit, OSError]
)


@relaxed
@given(
    st.lists(returned | st.builds(lambda kind, text: kind(text), raised, any_text), min_size=1, max_size=PER_ACTION * 2)
)
def test_arbitrary_results_are_shown_or_explained(values: list[Any]) -> None:
    def give(index: int) -> Any:
        if isinstance(values[index], BaseException):
            raise values[index]
        return values[index]

    @tool
    def plain(index: int) -> Any:
        """Give."""
        return give(index)

    @tool(batch=lambda calls: [give(call["index"]) for call in calls])
    def batched(index: int) -> Any:
        """Give."""

    calls = tuple(
        ToolCall(f"{i}{made}", made, {"index": i}, "") for made in ("plain", "batched") for i in range(len(values))
    )
    transition = step(ToolEnv([plain, batched], max_output=MAX_OUTPUT), *calls)
    check(calls, transition)
    half = len(values)
    shown = [message.text for message in transition.messages]
    # The batched form must not let one call's failure reach another: both forms say the same, but for their names.
    assert [text.replace("plain", "T") for text in shown[:half]] == [
        text.replace("batched", "T") for text in shown[half:]
    ]


def test_the_check_of_these_tests_detects_errors() -> None:
    call = ToolCall("c", "read", {"title": "x"}, "")
    for text, error in (("\ud800", None), ("x" * 999, None), ("", ToolErrorKind.RAISED)):
        result = ToolResult((Text(text),), ok=error is None, error=error)
        with pytest.raises((AssertionError, UnicodeEncodeError)):
            check((call,), Transition((Message("tool", result.parts, call_id="c"),), results=(result,)))
