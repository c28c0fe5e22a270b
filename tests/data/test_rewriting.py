"""Trajectories whose context was rewritten: every row gives them the credit that it gives the same turns appended."""

from dataclasses import replace

import pytest
import torch

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.algorithms.validation import check_context_rewriting
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.data.assemble import assemble
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable


def rewritten(trajectory):
    """The same turns, the second and later of which saw a context of their own."""
    turns = (replace(turn, parent=None, new_ids=(9, 9, *turn.new_ids)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def credit_of(row, groups):
    batch = assemble(select_trainable(groups, {}).samples, pack_prefix_tree, row.token_scope)
    draws = torch.Generator().manual_seed(0)
    tokens, turns = len(batch.ids), len(batch.turn_trajectory)
    values, ends, reference, teacher = (
        torch.randn(count, dtype=torch.float64, generator=draws) for count in (tokens, turns, tokens, tokens)
    )
    old = batch.sampler_logprobs
    said = ModelOutputs(values=values, ends=ends, reference=reference, teacher=teacher, old=old, kl_coefficient=0.1)
    return row.compute_token_weights(batch, said)


def learnable(row):
    try:
        check_context_rewriting(row)
    except InvalidInput:
        return False
    return True


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if learnable(row)])
def test_credit_does_not_ask_in_which_context_a_token_was_chosen(make, name):
    row, groups = ALGORITHMS[name], make.random_groups(3, greedy=True)
    has_branches = [replace(group, trajectories=tuple(map(rewritten, group.trajectories))) for group in groups]
    one, other = credit_of(row, groups), credit_of(row, has_branches)
    assert torch.equal(one.advantage, other.advantage) and torch.equal(one.loss_weight, other.loss_weight)


def test_the_rows_that_learn_observations_are_refused():
    assert [name for name, row in ALGORITHMS.items() if not learnable(row)] == ["echo"]
    with pytest.raises(InvalidInput, match="take the rule append"):
        check_context_rewriting(ALGORITHMS["echo"])


def test_time_that_ends_with_a_context_would_be_seen(make, monkeypatch):
    from agent_r1.data.batch import TrainingBatch

    monkeypatch.setattr(TrainingBatch, "token_before", property(lambda batch: torch.full_like(batch.ids, -1)))
    row = ALGORITHMS["reinforce++"]
    cut = credit_of(row, make.random_groups(3))
    monkeypatch.undo()
    assert not torch.equal(cut.advantage, credit_of(row, make.random_groups(3)).advantage)


def test_a_turn_after_a_summary_is_where_the_world_had_left_it(make):
    page = (Message.tool("Alba: mayor Bruno.", "call_0_0"),)
    straight = [
        make.turn(0, [1], [2], observation=page),
        make.turn(1, [3], [4], parent=0),
    ]
    summed = [
        make.turn(0, [1], [2], observation=page),
        make.turn(1, [5], [6], parent=0, kind="summary"),
        make.turn(2, [1, 6], [4]),
    ]
    groups = make.groups(make.trajectory(straight, {"r": 1.0}), make.trajectory(summed, {"r": 0.0}, member=1))
    states = assemble(select_trainable(groups, {}).samples, pack_prefix_tree).turn_state_ids.tolist()
    assert states[0] == states[2] and states[1] == states[4] and states[3] not in (states[0], states[1])
