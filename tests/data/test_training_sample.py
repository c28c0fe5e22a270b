"""Each attempt is selected or excluded with a reason, and its rewards are counted once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.trajectory import STATUS_POLICY, Status, total_reward
from agent_r1.data.batch import select_trainable


@pytest.mark.parametrize("status", Status)
def test_the_status_policy_decides_by_status(status: Status, make: Any) -> None:
    trajectory = make.trajectory(make.chain(([1], [2])), {"score": 1.0}, status=status, reason="a reason")
    selection = select_trainable(make.groups(trajectory), {})
    if STATUS_POLICY[status] == "train":
        assert len(selection.samples) == 1 and not selection.excluded
    else:
        assert not selection.samples and selection.excluded[0].reason == f"{status}: a reason"


def test_rewards_are_weighted_by_name_and_placed_per_turn_or_on_the_whole(make: Any) -> None:
    turns = (make.turn(0, [1], [2], rewards={"tool": 0.5, "noise": 9.0}), make.turn(1, [3], [4], parent=0))
    rewards = {"answer": 1.0, "format": -1.0, "steps": (0.25, 0.75), "noise": None}
    trajectory = make.trajectory(turns, rewards)
    (sample,) = select_trainable(make.groups(trajectory), {"format": 0.5, "steps": 2.0, "noise": 0.0}).samples
    assert (sample.trajectory, sample.group) == (trajectory, 0)
    assert (sample.turn_rewards, sample.outcome_reward, sample.call_rewards) == ((1.0, 1.5), 0.5, ((), ()))
    assert sample.total == 3.0
    assert sample.named_rewards == {"tool": 0.5, "answer": 1.0, "format": -0.5, "steps": 2.0}


def test_call_rewards_are_weighted_by_name_and_summed_per_call(make: Any) -> None:
    calls = ({"ok": 1.0, "fit": 2.0}, {}, {"ok": 4.0})
    turn = make.turn(0, [1], [2, 3, 4, 5], call_rewards=calls, call_ends=(0, 1, 2), rewards={"fit": 1.0})
    (sample,) = select_trainable(make.groups(make.trajectory([turn])), {"ok": 0.5}).samples
    assert (sample.call_rewards, sample.turn_rewards) == (((2.5, 0.0, 2.0),), (1.0,))
    assert sample.named_rewards == {"ok": 2.5, "fit": 3.0} and sample.total == 5.5
    (ignored,) = select_trainable(make.groups(make.trajectory([turn])), {"ok": 0.0, "fit": 0.0}).samples
    assert ignored.total == 0.0


def test_a_greedy_attempt_gives_a_return_to_compare_with_and_no_sample(make: Any) -> None:
    turns = make.chain(([1], [2]))
    one, other = make.trajectory(turns, {"score": 1.0}), make.trajectory(turns, {"score": 0.0}, group=1)
    greedy = make.trajectory(turns, {"score": 0.5}, member=7)
    failed = make.trajectory(turns, {"score": None}, group=1, member=7)
    selection = select_trainable(make.groups(one, other, greedy={0: greedy, 1: failed}), {"score": 3.0})
    assert [sample.greedy_return for sample in selection.samples] == [1.5, None]
    assert [sample.trajectory for sample in selection.samples] == [one, other] and not selection.excluded


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ({"score": None}, "reward score could not be scored"),
        ({"score": math.nan}, "reward score is nan"),
        ({"score": (1.0,)}, "reward score has 1 numbers for 2 turns"),
        ({"score": (1.0, math.inf)}, "reward score is (1.0, inf)"),
        ({"score": (9e307, 9e307)}, "reward score is (9e+307, 9e+307)"),  # their sum overflows
    ],
)
def test_a_reward_that_is_none_or_not_finite_excludes_the_attempt(rewards: dict, reason: str, make: Any) -> None:
    trajectory = make.trajectory(make.chain(([1], [2]), ([3], [4])), rewards)
    assert total_reward(trajectory, {}) is None or "numbers for" in reason
    (excluded,) = select_trainable(make.groups(trajectory), {}).excluded
    assert (excluded.attempt, excluded.reason) == (trajectory.attempt, reason)
    assert select_trainable(make.groups(trajectory), {"score": 0.0}).samples  # a reward of weight 0 is ignored


def test_invalid_turns_exclude_the_attempt(make: Any) -> None:
    turn = make.turn(0, [1], [2, 3])
    broken = {
        "turn 0 has 2 tokens, 1 log-probabilities": replace(turn, logprobs=(-1.0,)),
        "turn 0 has an empty prompt": replace(turn, new_ids=()),
        "turn 0 has no version of the weights that sampled it": replace(turn, version_spans=(PolicyVersionSpan(1, 0),)),
        "reward tool of turn 0 is inf": replace(turn, rewards={"tool": math.inf}),
        "reward found of call 1 in turn 0 is nan": replace(
            turn, call_rewards=({"found": 1.0}, {"found": math.nan}), call_ends=(0, 1)
        ),
        "turn 0 has rewards for 1 calls and made 2": replace(turn, call_rewards=({"found": 1.0},), call_ends=(0, 1)),
        "no action tokens": replace(turn, action_ids=(), logprobs=()),
        "turn 0 has a call that ends outside its 2 tokens": replace(turn, call_rewards=({},), call_ends=(2,)),
        "reward ok of call 0 in turn 0 is nan": replace(turn, call_rewards=({"ok": math.nan},), call_ends=(1,)),
    }
    for reason, bad in broken.items():
        (excluded,) = select_trainable(make.groups(make.trajectory([bad])), {}).excluded
        assert excluded.reason == reason
    assert select_trainable(make.groups(make.trajectory([turn])), {}).samples


def test_the_order_of_groups_and_attempts_does_not_matter(make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    assert shuffled != groups
    assert select_trainable(shuffled, {}) == select_trainable(groups, {})


def test_a_reward_per_turn_may_leave_out_turns_without_environment_step(make: Any) -> None:
    summary = replace(make.turn(1, [3], [4], parent=0), kind="summary")
    turns = (make.turn(0, [1], [2]), summary, make.turn(2, [5], [6]))
    given = [(0.25, 0.75), (0.25, 0.5, 0.75), (0.25,)]
    selections = [select_trainable(make.groups(make.trajectory(turns, {"steps": one})), {}) for one in given]
    placed = [[sample.turn_rewards for sample in selection.samples] for selection in selections]
    assert placed == [[(0.25, 0.0, 0.75)], [(0.25, 0.5, 0.75)], []]
