"""Each attempt is learned from or left out with a reason, and its rewards are counted once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.core.acting import Span
from agent_r1.core.trajectory import TREATMENT, Status
from agent_r1.learn.samples import Sample, admit, sift


@pytest.mark.parametrize("status", Status)
def test_the_policy_table_decides_by_status(status: Status, make: Any) -> None:
    trajectory = make.trajectory(make.chain(([1], [2])), {"score": 1.0}, status=status, reason="a reason")
    admission = admit(make.groups(trajectory), {})
    if TREATMENT[status] == "train":
        assert len(admission.samples) == 1 and not admission.left_out
    else:
        assert not admission.samples and admission.left_out[0].reason == f"{status}: a reason"


def test_rewards_are_weighed_by_name_and_placed_per_turn_or_on_the_whole(make: Any) -> None:
    turns = (make.turn(0, [1], [2], rewards={"tool": 0.5, "noise": 9.0}), make.turn(1, [3], [4], parent=0))
    rewards = {"answer": 1.0, "format": -1.0, "steps": (0.25, 0.75), "noise": None}
    trajectory = make.trajectory(turns, rewards)
    (sample,) = admit(make.groups(trajectory), {"format": 0.5, "steps": 2.0, "noise": 0.0}).samples
    assert sample == Sample(trajectory, 0, (1.0, 1.5), 0.5)
    assert sample.total == 3.0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ({"score": None}, "reward score could not be scored"),
        ({"score": math.nan}, "reward score is nan"),
        ({"score": (1.0,)}, "reward score has 1 numbers for 2 turns"),
        ({"score": (1.0, math.inf)}, "reward score is (1.0, inf)"),
    ],
)
def test_a_reward_that_is_none_or_not_a_number_leaves_the_attempt_out(rewards: dict, reason: str, make: Any) -> None:
    trajectory = make.trajectory(make.chain(([1], [2]), ([3], [4])), rewards)
    (out,) = admit(make.groups(trajectory), {}).left_out
    assert (out.attempt, out.reason) == (trajectory.attempt, reason)
    assert admit(make.groups(trajectory), {"score": 0.0}).samples  # a name that weighs nothing is not asked for


def test_turns_that_cannot_be_learned_from_leave_the_attempt_out(make: Any) -> None:
    turn = make.turn(0, [1], [2, 3])
    broken = {
        "turn 0 has 2 tokens, 1 log-probabilities": replace(turn, logprobs=(-1.0,)),
        "turn 0 acts on an empty prompt": replace(turn, new_ids=()),
        "turn 0 does not say which weights sampled it": replace(turn, spans=(Span(1, 0),)),
        "reward tool of turn 0 is inf": replace(turn, rewards={"tool": math.inf}),
        "no action tokens": replace(turn, action_ids=(), logprobs=()),
    }
    for reason, bad in broken.items():
        (out,) = admit(make.groups(make.trajectory([bad])), {}).left_out
        assert out.reason == reason
    assert admit(make.groups(make.trajectory([turn])), {}).samples


def test_the_order_in_which_attempts_are_handed_in_does_not_matter(make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    assert shuffled != groups
    assert admit(shuffled, {}) == admit(groups, {})


def test_filters_see_what_the_one_before_left_and_give_their_reasons(make: Any) -> None:
    admission = admit(make.random_groups(0, groups=2, members=2), {})

    def first_group(samples: tuple[Sample, ...]) -> list[str | None]:
        return ["group 0" if sample.group == 0 else None for sample in samples]

    def everything(samples: tuple[Sample, ...]) -> list[str | None]:
        return ["all"] * len(samples)

    sifted = sift(admission, (first_group, everything))
    assert sifted.samples == ()
    assert [out.reason for out in sifted.left_out] == ["group 0", "group 0", "all", "all"]
    assert {out.attempt for out in sifted.left_out} == {one.trajectory.attempt for one in admission.samples}
