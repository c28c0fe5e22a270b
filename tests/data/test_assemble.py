"""A batch holds tokens in order of time, with rewards on action tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.trajectory import Trajectory
from agent_r1.data.batch import TokenScope, TrainingBatch, assemble_batch, select_trainable
from agent_r1.data.sequences import pack_per_turn, pack_prefix_tree


def batch_of(make: Any, *trajectories: Trajectory, scope: TokenScope = "actions") -> TrainingBatch:
    return assemble_batch(select_trainable(make.groups(*trajectories), {}).samples, pack_prefix_tree, scope)


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
    for packing in (pack_prefix_tree, pack_per_turn):
        batch = assemble_batch(select_trainable(make.groups(make.trajectory(turns)), {}).samples, packing)
        assert batch.ids.tolist() == [2, 4, 6]
        tokens = torch.cat([sequence.tokens for sequence in batch.sequences]).tolist()
        assert sorted(tokens) == [0, 1, 2]


def test_each_token_has_the_version_and_log_probability_of_its_sampler(make: Any) -> None:
    turn = replace(
        make.turn(0, [1], [2, 3, 4], logprobs=(-0.1, -0.2, -0.3)),
        version_spans=(PolicyVersionSpan(0, 5), PolicyVersionSpan(2, 6)),
    )
    batch = batch_of(make, make.trajectory([turn]))
    assert batch.versions.tolist() == [5, 5, 6]
    assert batch.sampler_logprobs.tolist() == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize("truncated", [False, True])
def test_the_outcome_is_on_the_last_action_token_also_if_turns_ran_out(make: Any, truncated: bool) -> None:
    # if turns run out, the last turn has an observation and no action
    turns = make.chain(([1], [2, 3]), ([4], [5]), ([6, 7], []))
    kept = turns if truncated else turns[:2]
    batch = batch_of(make, make.trajectory(kept, {"answer": -1.0}, truncated=truncated))
    assert batch.token_rewards.tolist() == [0.0, 0.0, -1.0]
    assert batch.truncated.tolist() == [truncated]
    assert batch.returns.tolist() == [-1.0]


def test_a_turns_reward_is_on_its_last_token_and_no_reward_is_lost(make: Any) -> None:
    turns = make.chain(([1], []), ([2], [3, 4]), ([5], []), ([6], [7]), ([8], []))
    batch = batch_of(make, make.trajectory(turns, {"steps": (1.0, 10.0, 100.0, 1000.0, 10000.0), "answer": 0.5}))
    assert batch.turn_rewards.tolist() == [111.0, 11000.5]
    assert batch.process_rewards.tolist() == [111.0, 11000.0]
    assert batch.token_rewards.tolist() == [0.0, 111.0, 11000.5]
    assert batch.returns.tolist() == [11111.5]


def test_a_calls_reward_is_on_the_token_that_ends_the_call(make: Any) -> None:
    turn = make.turn(
        0, [1], [2, 3, 4, 5], call_rewards=({"ok": 1.0}, {"ok": 10.0}), call_ends=(1, 2), rewards={"tidy": 100.0}
    )
    batch = batch_of(make, make.trajectory([turn], {"answer": 1000.0}))
    assert batch.token_rewards.tolist() == [0.0, 1.0, 10.0, 1100.0]
    assert batch.process_rewards.tolist() == [111.0] and batch.outcome_rewards.tolist() == [1000.0]
    (without,) = select_trainable(
        make.groups(make.trajectory([turn], {"answer": 1000.0})), {"ok": 0.0, "tidy": 0.0}
    ).samples
    sparse = assemble_batch([without], pack_prefix_tree)  # control: rewards of weight 0 are not there
    assert sparse.token_rewards.tolist() == [0.0, 0.0, 0.0, 1000.0]


def test_a_batch_of_all_tokens_holds_the_observations_between_actions(make: Any) -> None:
    turns = make.chain(([1], [2, 3]), ([4, 5], [6]), ([7], []))
    first = make.trajectory(turns, {"answer": 1.0})
    second = make.trajectory(make.chain(([8], [9]), ([10], [11])), {"answer": 2.0}, member=1)
    batch = batch_of(make, first, second, scope="all")
    # without the prompt and without the last observation, which no action follows
    assert batch.ids.tolist() == [2, 3, 4, 5, 6, 9, 10, 11]
    assert batch.action_mask.tolist() == [True, True, False, False, True, True, False, True]
    assert batch.token_turn.tolist() == [0, 0, 0, 0, 1, 2, 2, 3]
    assert batch.token_rewards.tolist() == [0, 0, 0, 0, 1, 0, 0, 2]
    assert batch.sampler_logprobs.isnan().tolist() == (~batch.action_mask).tolist()
    actions = batch.actions()
    assert actions.ids.tolist() == [2, 3, 6, 9, 11] and actions.returns.tolist() == [1, 2]
    assert actions.token_turn.tolist() == [0, 0, 1, 2, 3]
    assert batch_of(make, first, second).ids.tolist() == actions.ids.tolist()


def test_a_rewritten_context_and_an_empty_one_add_no_observation(make: Any) -> None:
    rewritten = make.trajectory([make.turn(0, [1], [2]), make.turn(1, [3], [4])])
    assert batch_of(make, rewritten, scope="all").ids.tolist() == [2, 4]
    empty = make.trajectory([make.turn(0, [1], [2]), make.turn(1, [], [4], parent=0)])
    assert batch_of(make, empty, scope="all").ids.tolist() == [2, 4]


def test_turns_have_a_state_and_whether_they_used_a_tool(make: Any) -> None:
    result = ToolResult((Text("found"),), ok=True)
    found, lost = (Message.tool("found", "call_0"),), (Message.tool("lost", "call_0"),)

    def attempt(member: int, observation: tuple[Message, ...], group: int = 0) -> Trajectory:
        turns = (
            make.turn(0, [1], [2], observation=observation, results=(result,)),
            make.turn(1, [3], [4], parent=0),
        )
        return make.trajectory(turns, group=group, member=member, start=[Message.user("Where?")])

    batch = batch_of(make, attempt(0, found), attempt(1, lost), attempt(2, found), attempt(0, found, group=1))
    assert batch.turn_state_ids.tolist() == [0, 1, 0, 2, 0, 1, 3, 4]
    assert batch.turn_used_tool.tolist() == [True, False] * 4
    assert batch.previous_turn.tolist() == [-1, 0, -1, 2, -1, 4, -1, 6]


def test_rewards_by_name_and_the_greedy_return_are_columns(make: Any) -> None:
    turns = make.chain(([1], [2]))
    one = make.trajectory(turns, {"em": 1.0, "f1": 0.5})
    other = make.trajectory(turns, {"em": 0.0}, group=1)
    groups = make.groups(one, other, greedy={1: make.trajectory(turns, {"em": 1.0, "f1": 1.0}, group=1, member=1)})
    weights = {"f1": 3.0}
    batch = assemble_batch(select_trainable(groups, weights).samples, pack_prefix_tree, "actions", weights)
    assert [(reward.name, reward.weight, reward.returns.tolist()) for reward in batch.named_rewards] == [
        ("em", 1.0, [1.0, 0.0]),
        ("f1", 3.0, [1.5, 0.0]),
    ]
    assert batch.greedy_return[0].isnan() and batch.greedy_return[1] == 4.0
