"""Filters exclude attempts, each with a reason, and see the attempts that the previous filter kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.algorithms.algorithm import CONSTANT, Filters, drop_constant_groups, top_variance
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.trajectory import Status, Turn
from agent_r1.data.batch import Selection, select_trainable

Make = Any


def scored(make: Make, *groups: Sequence[float]) -> Selection:
    """Return the selection of attempts of one turn with these scores, by group."""
    turns = make.chain(([1], [2]))
    return select_trainable(
        make.groups(
            *(
                make.trajectory(turns, {"score": score}, group=group, member=member)
                for group, scores in enumerate(groups)
                for member, score in enumerate(scores)
            )
        ),
        {},
    )


def reasons(selection: Selection, filters: Filters, version: int = 0) -> dict[tuple[int, int], str]:
    filtered = filters.apply(selection, version)
    assert {excluded.attempt for excluded in filtered.excluded} | {
        one.trajectory.attempt for one in filtered.samples
    } == {one.trajectory.attempt for one in selection.samples}
    return {
        (excluded.attempt.group_id, excluded.attempt.sample_index): excluded.reason for excluded in filtered.excluded
    }


def test_constant_groups_are_dropped_also_with_float_noise_or_of_one(make: Make) -> None:
    selection = scored(make, (0.1 + 0.2, 0.3), (1.0, 0.0), (1.0,))
    dropped = drop_constant_groups(selection).excluded
    assert [(one.attempt.group_id, one.attempt.sample_index, one.reason) for one in dropped] == [
        (0, 0, CONSTANT),
        (0, 1, CONSTANT),
        (2, 0, CONSTANT),
    ]
    assert drop_constant_groups(scored(make, (0.3, 0.3 + 1e-5))).excluded == ()  # control


def test_the_groups_of_largest_variance_are_kept_and_of_equal_ones_the_earlier(make: Make) -> None:
    samples = scored(make, (0, 1), (0, 3), (0, 1), (0, 2)).samples
    for share, kept in ((0.5, {1, 3}), (0.75, {0, 1, 3}), (0.1, {1}), (1.0, {0, 1, 2, 3})):
        found = top_variance(samples, share)
        assert {one.group for one, reason in zip(samples, found, strict=True) if reason is None} == kept
        assert set(found) <= {None, "little variance"}
    assert top_variance([], 0.5) == [] and drop_constant_groups(Selection((), ())) == Selection((), ())


def test_truncated_attempts_are_excluded_from_the_loss_only(make: Make) -> None:
    turns = make.chain(([1], [2]))
    cut = make.trajectory(turns, member=1, status=Status.OUT_OF_TURNS, truncated=True)
    selection = select_trainable(make.groups(make.trajectory(turns), cut), {})
    filters = Filters(overlong=True)
    assert filters.loss_excluded(selection.samples) == [None, "overlong"]
    assert reasons(selection, filters) == {}, "it still counts in the baseline"
    assert Filters().loss_excluded(selection.samples) == [None, None]


def test_attempts_without_a_greedy_attempt_are_removed(make: Make) -> None:
    turns = make.chain(([1], [2]))
    trajectories = [make.trajectory(turns, {"score": 1.0}, group=group) for group in range(2)]
    greedy = make.trajectory(turns, {"score": 0.5}, member=1)
    selection = select_trainable(make.groups(*trajectories, greedy={0: greedy}), {})
    assert reasons(selection, Filters(greedy=True)) == {(1, 0): "the greedy attempt could not be scored: there is none"}


def test_stale_attempts_are_removed(make: Make) -> None:
    fresh = make.turn(0, [1], [2, 3], version=5)
    mixed = replace(fresh, version_spans=(PolicyVersionSpan(0, 5), PolicyVersionSpan(1, 3)))
    samples = select_trainable(make.groups(make.trajectory([fresh]), make.trajectory([mixed], member=1)), {}).samples
    assert [sample.version for sample in samples] == [5, 3]
    selection = Selection(samples, ())
    assert reasons(selection, Filters(staleness=1), version=5) == {(0, 1): "stale: sampled 2 updates ago"}
    assert reasons(selection, Filters(staleness=2), version=5) == {}
    assert reasons(selection, Filters(staleness=0), version=3) == {}


def calling(*errors: str | None) -> Action:
    calls = tuple(ToolCall(f"call_{n}", "search", None if error else {}, "", error) for n, error in enumerate(errors))
    return Action(Message.assistant("", calls), "")


@pytest.mark.parametrize(
    ("action", "finish_reason", "is_empty"),
    [
        (Action(Message.assistant("42"), "42"), "stop", False),
        (Action(Message.assistant(" \n"), " \n"), "stop", True),
        (Action(Message.assistant("4"), "4"), "length", True),
        (calling(None), "stop", False),
        (calling("no JSON"), "stop", True),
        (calling("no JSON", None), "stop", False),
    ],
)
def test_a_void_turn_neither_calls_nor_answers(action: Action, finish_reason: str, is_empty: bool, make: Make) -> None:
    answer = Action(Message.assistant("thus"), "thus")
    turns: list[Turn] = [
        make.turn(0, [1], [2], action=answer),
        make.turn(1, [3], [4], parent=0, action=action, finish_reason=finish_reason),
    ]
    samples = select_trainable(make.groups(make.trajectory(turns)), {}).samples
    assert Filters(empty_turn=True, overlong=True).loss_excluded(samples) == ["empty turn" if is_empty else None]


def test_each_filter_sees_what_the_one_before_left(make: Make) -> None:
    # without the unsuccessful attempts the first group has the least variance
    selection = scored(make, (-9.0, 1.0, 1.0), (1.0, 2.0))
    found = reasons(selection, Filters(success=1.0, top_variance=0.5))
    assert found == {(0, 0): "unsuccessful", (0, 1): "little variance", (0, 2): "little variance"}
    assert reasons(selection, Filters(top_variance=0.5)).keys() == {(1, 0), (1, 1)}  # control


def test_filters_are_applied_in_the_order_of_their_settings(make: Make) -> None:
    selection = scored(make, (0.0, 0.0), (0.0, 5.0))
    settings: dict[str, Any] = {"staleness": 1, "greedy": True, "success": 1.0, "top_variance": 0.5}
    loss_only = {"overlong": True, "empty_turn": True}
    everything = Filters(**settings, **loss_only)
    assert len(settings) + len(loss_only) == len(Filters.model_fields) == everything.formula.count(";") + 1
    first = []
    while settings:  # the first attempt fails in every filter, and is removed by the first one
        first.append(reasons(selection, Filters(**settings), version=9)[0, 0].partition(":")[0])
        del settings[next(iter(settings))]
    assert first == ["stale", "the greedy attempt could not be scored", "unsuccessful", "little variance"]
    assert Filters().formula == ""
