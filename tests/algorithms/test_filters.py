"""Filters set attempts aside, each with its reason, and see what the one before left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from agent_r1.algorithms.filters import Filters, apply_filters, empty_turn, stale, top_variance, zero_variance
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, ToolCall
from agent_r1.core.trajectory import Status, Turn
from agent_r1.data.training_sample import Selection, TrainingSample, select_trainable

Make = Any


def scored(make: Make, *groups: Sequence[float]) -> Selection:
    """Attempts of one turn with these scores, by group."""
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


def reasons(admission: Selection, filters: Filters, version: int = 0) -> dict[tuple[int, int], str]:
    sifted = apply_filters(admission, filters, version)
    assert {out.attempt for out in sifted.excluded} | {one.trajectory.attempt for one in sifted.samples} == {
        one.trajectory.attempt for one in admission.samples
    }
    return {(out.attempt.group_id, out.attempt.sample_index): out.reason for out in sifted.excluded}


def test_without_filters_all_stay(make: Make) -> None:
    admission = scored(make, (1.0, 1.0), (0.0, 5.0))
    assert apply_filters(admission, Filters(), 9) == admission


def test_groups_without_variance_also_of_float_noise_or_of_one(make: Make) -> None:
    admission = scored(make, (0.1 + 0.2, 0.3), (1.0, 0.0), (1.0,))
    zero = "zero variance"
    assert reasons(admission, Filters(zero_variance=1e-6)) == {(0, 0): zero, (0, 1): zero, (2, 0): zero}
    assert (0, 0) not in reasons(admission, Filters(zero_variance=0.0))  # control: the tolerance is what counts


def test_the_groups_of_most_variance_of_equals_the_earlier(make: Make) -> None:
    samples = scored(make, (0, 1), (0, 3), (0, 1), (0, 2)).samples
    for share, kept in ((0.5, {1, 3}), (0.75, {0, 1, 3}), (0.1, {1}), (1.0, {0, 1, 2, 3})):
        found = top_variance(samples, share)
        assert {one.group for one, reason in zip(samples, found, strict=True) if reason is None} == kept
        assert set(found) <= {None, "little variance"}
    assert top_variance([], 0.5) == zero_variance([], 0.0) == []


def test_attempts_that_earned_less(make: Make) -> None:
    assert reasons(scored(make, (0.9, 1.0, 1.1)), Filters(success=1.0)) == {(0, 0): "unsuccessful"}


def test_attempts_out_of_turns_or_tokens(make: Make) -> None:
    turns = make.chain(([1], [2]))
    cut = make.trajectory(turns, member=1, status=Status.OUT_OF_TURNS, truncated=True)
    admission = select_trainable(make.groups(make.trajectory(turns), cut), {})
    filters = Filters(overlong=True)
    assert filters.loss_excluded(admission.samples) == [None, "overlong"]
    assert reasons(admission, filters) == {}, "the others are compared with it still"
    assert Filters().loss_excluded(admission.samples) == [None, None]


def test_attempts_whose_group_has_no_greedy_one(make: Make) -> None:
    turns = make.chain(([1], [2]))
    lived = [make.trajectory(turns, {"score": 1.0}, group=group) for group in range(2)]
    greedy = make.trajectory(turns, {"score": 0.5}, member=1)
    admission = select_trainable(make.groups(*lived, greedy={0: greedy}), {})
    assert reasons(admission, Filters(greedy=True)) == {(1, 0): "the greedy attempt could not be scored: there is none"}


def test_attempts_with_a_token_of_weights_too_old(make: Make) -> None:
    fresh = make.turn(0, [1], [2, 3], version=5)
    mixed = replace(fresh, version_spans=(PolicyVersionSpan(0, 5), PolicyVersionSpan(1, 3)))
    samples = select_trainable(make.groups(make.trajectory([fresh]), make.trajectory([mixed], member=1)), {}).samples
    assert [sample.version for sample in samples] == [5, 3]
    assert stale(samples, version=5, bound=2) == [None, None]
    assert stale(samples, version=5, bound=1) == [None, "stale: sampled 2 updates ago"]
    admission = Selection(samples, ())
    assert reasons(admission, Filters(staleness=0), version=5) == {(0, 1): "stale: sampled 2 updates ago"}
    assert reasons(admission, Filters(staleness=0), version=3) == {}


def calling(*errors: str | None) -> Action:
    calls = tuple(ToolCall(f"call_{n}", "search", None if error else {}, "", error) for n, error in enumerate(errors))
    return Action(Message.assistant("", calls), "")


@pytest.mark.parametrize(
    ("action", "stop", "void"),
    [
        (Action(Message.assistant("42"), "42"), "stop", False),
        (Action(Message.assistant(" \n"), " \n"), "stop", True),
        (Action(Message.assistant("4"), "4"), "length", True),
        (calling(None), "stop", False),
        (calling("no JSON"), "stop", True),
        (calling("no JSON", None), "stop", False),
    ],
)
def test_a_void_turn_neither_calls_nor_answers(action: Action, stop: str, void: bool, make: Make) -> None:
    said = Action(Message.assistant("thus"), "thus")
    turns: list[Turn] = [
        make.turn(0, [1], [2], action=said),
        make.turn(1, [3], [4], parent=0, action=action, finish_reason=stop),
    ]
    samples = select_trainable(make.groups(make.trajectory(turns)), {}).samples
    assert empty_turn(samples) == ["empty turn" if void else None]
    assert Filters(empty_turn=True, overlong=True).loss_excluded(samples) == ["empty turn" if void else None]


def test_each_sees_what_the_one_before_left(make: Make) -> None:
    # without the unsuccessful ones the first group has no variance any more
    admission = scored(make, (0.0, 1.0, 1.0), (1.0, 2.0))
    found = reasons(admission, Filters(success=1.0, zero_variance=0.0))
    assert found == {(0, 0): "unsuccessful", (0, 1): "zero variance", (0, 2): "zero variance"}
    assert reasons(admission, Filters(zero_variance=0.0)) == {}  # control


def test_they_are_asked_in_the_order_they_are_listed() -> None:
    everything = Filters(
        staleness=1, greedy=True, overlong=True, empty_turn=True, success=1.0, zero_variance=0.0, top_variance=0.5
    )
    muting = {"overlong", "empty_turn"}
    names = [(judge.func if isinstance(judge, partial) else judge).__name__ for judge in everything.action_mask(0)]
    assert names == [
        "stale", "without_greedy", "unsuccessful", "zero_variance", "top_variance",
    ]  # fmt: skip
    assert len(names) + len(muting) == len(Filters.model_fields) == everything.formula.count(";") + 1
    assert list(Filters().action_mask(0)) == [] and Filters().formula == ""


def test_who_was_left_out_before_stays_so(make: Make) -> None:
    admission = scored(make, (1.0, 1.0))
    (first, second) = admission.samples
    before = apply_filters(Selection((first,), admission.excluded), Filters(success=2.0), 0).excluded
    after = apply_filters(Selection((second,), before), Filters(zero_variance=0.0), 0)
    assert [out.reason for out in after.excluded] == ["unsuccessful", "zero variance"]


COMPARING = {name for name, row in ALGORITHMS.items() if "group" in row.needs} - {"gdpo", "reinforce++-baseline"}


def test_rows_that_compare_in_a_group_leave_out_those_without_variance(make: Make) -> None:
    samples: Sequence[TrainingSample] = scored(make, (1.0, 1.0), (1.0, 2.0)).samples
    for name in COMPARING - {"gigpo", "hgpo", "process-grpo", "mt-grpo", "gtpo"}:
        assert reasons(Selection(tuple(samples), ()), ALGORITHMS[name].filters) == {
            (0, 0): "zero variance",
            (0, 1): "zero variance",
        }, name
    for name in ("ppo", "reinforce++", "gigpo", "hgpo", "process-grpo", "mt-grpo", "gtpo"):
        assert ALGORITHMS[name].filters == Filters()  # turns may differ where totals do not
