"""Core types survive a round trip through JSON, types included."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from agent_r1.core.messages import Action, Image, Message, Text, ToolCall, ToolResult
from agent_r1.store import rows as codec

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.sampled_from(["$tuple", "$pairs"])
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=12
)
parts = st.lists(st.text().map(Text) | st.builds(Image, st.text(), st.text())).map(tuple)
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
    back = codec.decode_value(through_json(codec.encode_value(value)))
    assert repr(back) == repr(value)


@given(st.builds(Action, messages, st.text()))
def test_actions_round_trip(action: Action) -> None:
    assert codec.decode_action(through_json(codec.encode_action(action))) == action


@given(results)
def test_tool_results_round_trip(result: ToolResult) -> None:
    assert codec.decode_result(through_json(codec.encode_result(result))) == result


def test_values_that_json_cannot_hold_become_text() -> None:
    assert codec.decode_value(through_json(codec.encode_value({"seen": {3}}))) == {"seen": "{3}"}


@pytest.mark.parametrize("levels", [codec.MAX_DEPTH + 1, 100_000])
def test_endless_nesting_is_cut(levels: int) -> None:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    kept = codec.decode_value(through_json(codec.encode_value(value)))
    for _ in range(codec.MAX_DEPTH):
        [kept] = kept
    assert kept == codec.TOO_DEEP
