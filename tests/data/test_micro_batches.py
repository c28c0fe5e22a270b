"""Micro-batches hold every sequence once, within the token limit, with little padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from agent_r1.data.sequences import (
    MAX_PADDING,
    TokenSequence,
    TurnPlace,
    by_sequence,
    by_trajectory,
    make_micro_batches,
    make_single_rows,
    pack_prefix_tree,
)
from agent_r1.model.forward import tree_mask


def sequence(number: int, length: int, has_branches: bool = False) -> TokenSequence:
    """Return ``length`` tokens, of which the last is trained on; with branches it does not see the one before it."""
    subtree_end = torch.full((length,), length)
    if has_branches:
        subtree_end[-2] = length - 1
    return TokenSequence(
        trajectory=number,
        ids=torch.full((length,), number + 1),
        position_ids=torch.arange(length),
        subtree_end=subtree_end,
        logit_positions=torch.tensor([length - 2]),
        token_positions=torch.tensor([length - 1]),
        tokens=torch.tensor([number]),
        post_action_states=torch.tensor([length - 1]),
        turns=torch.tensor([number]),
        has_branches=has_branches,
    )


LENGTHS = st.lists(st.tuples(st.integers(3, 60), st.booleans()), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_every_sequence_is_there_once_within_the_limit_and_with_under_ten_percent_padding(
    specs: list[tuple[int, bool]], max_tokens: int
) -> None:
    sequences = [sequence(number, length, has_branches) for number, (length, has_branches) in enumerate(specs)]
    batches = list(make_micro_batches(by_sequence(sequences), max_tokens))
    assert sorted(torch.cat([batch.tokens for batch in batches]).tolist()) == list(range(len(sequences)))
    for batch in batches:
        padded = batch.ids.numel()
        assert padded <= max_tokens or len(batch.ids) == 1
        assert padded - batch.num_tokens < MAX_PADDING * padded
        assert torch.equal(batch.ids.flatten()[batch.logit_positions], batch.tokens + 1)
        assert torch.equal(batch.ids.flatten()[batch.post_action_states], batch.turns + 1)
        has_branches = {specs[token][1] for token in batch.tokens.tolist()}
        assert has_branches == {batch.subtree_end is not None} == {batch.position_ids is not None}


def test_the_longest_come_first_and_equal_ones_in_the_given_order() -> None:
    batches = make_micro_batches(by_sequence([sequence(number, 5 + number % 3) for number in range(12)]), 30)
    assert torch.cat([batch.tokens for batch in batches]).tolist() == [2, 5, 8, 11, 1, 4, 7, 10, 0, 3, 6, 9]


def test_the_copies_of_a_prefix_count_in_the_size_of_a_micro_batch() -> None:
    blocks = by_sequence([sequence(number, 5) for number in range(2)])
    for max_tokens, sizes in ((30, [30]), (29, [15, 15])):
        assert [batch.padded_size for batch in make_micro_batches(blocks, max_tokens, prefix=10)] == sizes


def test_a_token_sees_its_own_path_and_never_padding(make: Any) -> None:
    turns = [make.turn(0, [5, 6], [7]), make.turn(1, [3], [8], parent=0), make.turn(2, [4], [9], parent=0)]
    sequences = [
        *pack_prefix_tree(make.trajectory(turns), 0, [TurnPlace(0, 0), TurnPlace(1, 1), TurnPlace(2, 2)]),
        *pack_prefix_tree(
            make.trajectory([make.turn(0, [5, 6, 6], [7]), *turns[1:]]),
            1,
            [TurnPlace(3, 3), TurnPlace(4, 4), TurnPlace(5, 5)],
        ),
    ]
    (batch,) = make_micro_batches(by_sequence(sequences), 100)
    assert batch.subtree_end is not None
    mask = tree_mask(batch.subtree_end)
    longer, shorter = mask
    assert shorter[6].tolist() == [True, True, True, False, False, True, True, False]
    assert longer[7].tolist() == [True, True, True, True, False, False, True, True]
    assert not shorter[:7, 7].any()
    assert mask.diagonal(dim1=1, dim2=2).all()


@given(LENGTHS, st.integers(1, 200), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_single_rows_hold_every_sequence_once_without_padding(
    specs: list[tuple[int, bool]], max_tokens: int, prefix: int
) -> None:
    sequences = [sequence(number, *spec) for number, spec in enumerate(specs)]
    batches = list(make_single_rows(by_sequence(sequences), max_tokens, prefix))
    assert sorted(torch.cat([batch.tokens for batch in batches]).tolist()) == list(range(len(sequences)))
    for batch in batches:
        held = [sequences[token] for token in batch.tokens.tolist()]
        assert batch.ids[0].tolist() == [token for one in held for token in one.ids.tolist()]
        assert batch.num_tokens == batch.ids.numel() and (batch.padded_size <= max_tokens or len(held) == 1)
        assert batch.subtree_end is not None
        whole = torch.block_diag(*(tree_mask(one.subtree_end[None])[0].int() for one in held))
        assert torch.equal(tree_mask(batch.subtree_end)[0], whole.bool())


@given(LENGTHS, st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_sequences_of_a_block_stay_together(specs: list[tuple[int, bool]], max_tokens: int) -> None:
    sequences = [replace(sequence(number, *spec), trajectory=number // 3) for number, spec in enumerate(specs)]
    batches = list(make_micro_batches(by_trajectory(sequences), max_tokens))
    assert sorted(torch.cat([batch.tokens for batch in batches]).tolist()) == list(range(len(sequences)))
    trajectories = [{token // 3 for token in batch.tokens.tolist()} for batch in batches]
    assert sum(map(len, trajectories)) == len(set().union(*trajectories))


def test_sequences_of_different_blocks_may_be_separated() -> None:
    # control: the trajectory's two sequences do not fit together
    pair = [sequence(number, 10) for number in range(2)]
    assert len(list(make_micro_batches(by_sequence(pair), 10))) == 2
    assert len(list(make_micro_batches(by_trajectory([replace(one, trajectory=0) for one in pair]), 10))) == 1
    assert list(make_micro_batches([], 10)) == []
