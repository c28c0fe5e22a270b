"""A batch lays action tokens out in order of time, and rewards on action tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.core.acting import Span
from agent_r1.core.trajectory import Trajectory
from agent_r1.learn.batch import Batch, assemble
from agent_r1.learn.samples import admit
from agent_r1.learn.sequences import path_sequences, tree_sequences


def batch_of(make: Any, *trajectories: Trajectory) -> Batch:
    return assemble(admit(make.groups(*trajectories), {}).samples, tree_sequences)


def test_action_tokens_are_ordered_by_trajectory_turn_and_position(make: Any) -> None:
    first = make.trajectory(make.chain(([1], [2, 3]), ([4, 5], [6])))
    second = make.trajectory(make.chain(([1], [7, 8])), member=1)
    third = make.trajectory(make.chain(([1], [9])), group=1)
    batch = batch_of(make, third, second, first)
    assert batch.ids.tolist() == [2, 3, 6, 7, 8, 9]
    assert batch.token_turn.tolist() == [0, 0, 1, 2, 2, 3]
    assert batch.turn_trajectory.tolist() == [0, 0, 1, 2]
    assert batch.trajectory_group.tolist() == [0, 0, 1]
    assert batch.token_trajectory.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.attempts == (first.attempt, second.attempt, third.attempt)


def test_time_is_turn_order_also_across_a_rewritten_context_and_branches(make: Any) -> None:
    turns = [make.turn(0, [1], [2]), make.turn(1, [3], [4]), make.turn(2, [5], [6], parent=0)]
    for layout in (tree_sequences, path_sequences):
        batch = assemble(admit(make.groups(make.trajectory(turns)), {}).samples, layout)
        assert batch.ids.tolist() == [2, 4, 6]
        learned = torch.cat([sequence.tokens for sequence in batch.sequences]).tolist()
        assert sorted(learned) == [0, 1, 2]


def test_each_token_knows_what_sampled_it(make: Any) -> None:
    turn = replace(make.turn(0, [1], [2, 3, 4], logprobs=(-0.1, -0.2, -0.3)), spans=(Span(0, 5), Span(2, 6)))
    batch = batch_of(make, make.trajectory([turn]))
    assert batch.versions.tolist() == [5, 5, 6]
    assert batch.sampler_logprobs.tolist() == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize("truncated", [False, True])
def test_the_terminal_reward_lands_on_the_last_action_token_also_when_turns_ran_out(make: Any, truncated: bool) -> None:
    # when turns run out the last observation is a turn that did not act any more
    turns = make.chain(([1], [2, 3]), ([4], [5]), ([6, 7], []))
    kept = turns if truncated else turns[:2]
    batch = batch_of(make, make.trajectory(kept, {"answer": -1.0}, truncated=truncated))
    assert batch.token_rewards.tolist() == [0.0, 0.0, -1.0]
    assert batch.truncated.tolist() == [truncated]
    assert batch.returns.tolist() == [-1.0]


def test_a_turns_reward_lands_on_its_last_token_and_nothing_is_lost(make: Any) -> None:
    turns = make.chain(([1], []), ([2], [3, 4]), ([5], []), ([6], [7]), ([8], []))
    batch = batch_of(make, make.trajectory(turns, {"steps": (1.0, 10.0, 100.0, 1000.0, 10000.0), "answer": 0.5}))
    assert batch.turn_rewards.tolist() == [111.0, 11000.0]
    assert batch.token_rewards.tolist() == [0.0, 111.0, 11000.5]
    assert batch.returns.tolist() == [11111.5]
