"""Core types survive the way through JSON, types included."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.core.messages import Action, Media, Message, Text, ToolCall
from agent_r1.core.tool import ToolResult
from agent_r1.store import codec

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.sampled_from(["$tuple", "$pairs"])
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=12
)
parts = st.lists(st.text().map(Text) | st.builds(Media, st.text(), st.text())).map(tuple)
calls = st.builds(
    ToolCall, st.text(), st.text(), st.none() | st.dictionaries(st.text(), values), st.text(), st.none() | st.text()
)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    parts,
    st.lists(calls, max_size=2).map(tuple),
    st.none() | st.text(),
    st.none() | st.text(),
)
results = st.builds(ToolResult, parts, st.booleans(), st.none() | st.text(), values, st.floats(0, allow_infinity=False))


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


@given(values)
def test_values_keep_their_types(value: Any) -> None:
    back = codec.to_value(through_json(codec.from_value(value)))
    assert repr(back) == repr(value)


@given(st.builds(Action, messages, st.text()))
def test_actions_come_back(action: Action) -> None:
    assert codec.to_action(through_json(codec.from_action(action))) == action


@given(results)
def test_tool_results_come_back(result: ToolResult) -> None:
    assert codec.to_result(through_json(codec.from_result(result))) == result


def test_plain_json_would_turn_a_tuple_into_a_list() -> None:
    assert through_json((1,)) == [1]
    assert codec.to_value(through_json(codec.from_value((1,)))) == (1,)


def test_what_json_cannot_hold_is_kept_as_text() -> None:
    assert codec.to_value(through_json(codec.from_value({"seen": {3}}))) == {"seen": "{3}"}


@pytest.mark.parametrize("levels", [codec.DEEPEST + 1, 100_000])
def test_bottomless_nesting_is_cut(levels: int) -> None:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    kept = codec.to_value(through_json(codec.from_value(value)))
    for _ in range(codec.DEEPEST):
        [kept] = kept
    assert kept == codec.TOO_DEEP
