"""Trajectories with a rewritten context have the advantages of the same turns in an appended context."""

from dataclasses import replace

import pytest
import torch

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.algorithms.validation import check_context_rewriting
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.data.batch import assemble_batch, select_trainable
from agent_r1.data.sequences import pack_prefix_tree


def rewritten(trajectory):
    """Return the same turns, of which the second and later ones have a context of their own."""
    turns = (replace(turn, parent=None, new_ids=(9, 9, *turn.new_ids)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def weights_of(algorithm, groups):
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree, algorithm.token_scope)
    draws = torch.Generator().manual_seed(0)
    tokens, turns = len(batch.ids), len(batch.turn_trajectory)
    before_token, after_action, reference, teacher = (
        torch.randn(count, dtype=torch.float64, generator=draws) for count in (tokens, turns, tokens, tokens)
    )
    outputs = ModelOutputs(batch.sampler_logprobs, StateValues(before_token, after_action), reference, teacher, teacher)
    return algorithm.compute_token_weights(batch, outputs, kl_coef=0.1)


def allows_rewriting(algorithm):
    try:
        check_context_rewriting(algorithm)
    except InvalidInput:
        return False
    return True


def test_token_weights_do_not_depend_on_the_context_of_a_token(make):
    groups = make.random_groups(3, greedy=True)
    rewritten_groups = [replace(group, trajectories=tuple(map(rewritten, group.trajectories))) for group in groups]
    for name, algorithm in ALGORITHMS.items():
        if allows_rewriting(algorithm):
            one, other = weights_of(algorithm, groups), weights_of(algorithm, rewritten_groups)
            assert torch.equal(one.advantage, other.advantage), name
            assert torch.equal(one.loss_weight, other.loss_weight), name


def test_algorithms_that_train_on_observations_are_refused():
    assert [name for name, algorithm in ALGORITHMS.items() if not allows_rewriting(algorithm)] == ["echo"]
    with pytest.raises(InvalidInput, match="context_policy"):
        check_context_rewriting(ALGORITHMS["echo"])


def test_returns_that_end_with_a_context_would_be_detected(make, monkeypatch):
    # control: the return of each token is its own reward
    algorithm, groups = ALGORITHMS["reinforce++"], make.random_groups(3)
    expected = weights_of(algorithm, groups)
    monkeypatch.setattr("agent_r1.algorithms.advantages.returns.discounted_sums", lambda x, unit, discount: x)
    assert not torch.equal(weights_of(algorithm, groups).advantage, expected.advantage)


def test_a_summary_and_the_turn_after_it_have_the_state_before_the_summary(make):
    page = (Message.tool("Alba: mayor Bruno.", "call_0_0"),)
    straight = [
        make.turn(0, [1], [2], observation=page),
        make.turn(1, [3], [4], parent=0),
    ]
    summarized = [
        make.turn(0, [1], [2], observation=page),
        make.turn(1, [5], [6], parent=0, kind="summary"),
        make.turn(2, [1, 6], [4]),
    ]
    groups = make.groups(make.trajectory(straight, {"r": 1.0}), make.trajectory(summarized, {"r": 0.0}, member=1))
    batch = assemble_batch(select_trainable(groups, {}).samples, pack_prefix_tree)
    assert batch.turn_state_ids.tolist() == [0, 1, 0, 1, 1]
    assert batch.turn_is_summary.tolist() == [False, False, False, True, False]
    joined, last_turns = batch.join_summaries()
    assert (joined.turn_state_ids.tolist(), last_turns.tolist()) == ([0, 1, 0, 1], [0, 1, 2, 4])
    assert joined.token_turn.tolist() == [0, 1, 2, 3, 3]
