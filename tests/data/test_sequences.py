"""Sequences hold each action token once, after exactly the tokens that the policy saw, and each shared prefix once."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.data.sequences import TokenSequence, TurnPlace, pack_causal, pack_per_turn, pack_prefix_tree


def places_of(trajectory: Trajectory) -> list[TurnPlace]:
    """Return the places of the turns in a batch of action tokens; turns without any have the number of the next."""
    lengths = [len(turn.action_ids) for turn in trajectory.turns]
    acting = [bool(length) for length in lengths]
    return [TurnPlace(sum(acting[:index]), sum(lengths[:index])) for index in range(len(lengths))]


def visible(sequence: TokenSequence, position: int) -> list[int]:
    """Return the tokens that the token at ``position`` may see, itself included, in order."""
    return [int(sequence.ids[j]) for j in range(position + 1) if position < sequence.subtree_end[j]]


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Return turns that append, branch, rewrite the context, observe nothing or sample nothing."""
    token = st.integers(0, 99)
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        new = draw(st.lists(token, min_size=1 if parent is None else 0, max_size=3))
        act = draw(st.lists(token, max_size=3))
        action = Action(Message.assistant(""), "")
        logprobs = (-1.0,) * len(act)
        turns.append(Turn(index, parent, tuple(new), tuple(act), logprobs, (PolicyVersionSpan(0, 0),), "stop", action))
    return Trajectory(AttemptId("run", "task", 0, 0), "task", tuple(turns), Status.COMPLETED)


@given(trees())
@settings(max_examples=200, deadline=None)
def test_every_action_token_is_there_once_after_exactly_what_the_policy_saw(trajectory: Trajectory) -> None:
    places = places_of(trajectory)
    expected = {
        place.action + j: list(trajectory.prompt_ids(turn) + turn.action_ids[:j])
        for turn, place in zip(trajectory.turns, places, strict=True)
        for j in range(len(turn.action_ids))
    }
    for packing in (pack_prefix_tree, pack_per_turn, pack_causal):
        found = [
            (int(token), visible(sequence, int(position)), int(sequence.position_ids[position]))
            for sequence in packing(trajectory, 0, places)
            for token, position in zip(sequence.tokens, sequence.logit_positions, strict=True)
        ]
        assert sorted(token for token, _, _ in found) == sorted(expected)
        assert all(context == expected[token] and last == len(context) - 1 for token, context, last in found)


@given(trees())
@settings(max_examples=100, deadline=None)
def test_a_tree_is_as_long_as_its_turns_and_marked_if_it_branches(trajectory: Trajectory) -> None:
    sequences = pack_prefix_tree(trajectory, 0, places_of(trajectory))
    total = sum(len(turn.new_ids) + len(turn.action_ids) for turn in trajectory.turns)
    assert sum(map(len, sequences)) <= total
    for sequence in sequences:
        assert sequence.has_branches == bool((sequence.position_ids != torch.arange(len(sequence))).any())


def test_an_appending_episode_is_one_causal_sequence_of_its_own_length(make: Any) -> None:
    pieces = [([10 + turn, 11, 12], [20 + turn, 21]) for turn in range(10)]
    trajectory = make.trajectory(make.chain(*pieces))
    (sequence,) = pack_prefix_tree(trajectory, 0, places_of(trajectory))
    assert len(sequence) == 50 and not sequence.has_branches
    assert tuple(sequence.ids.tolist()) == (*trajectory.prompt_ids(trajectory.turns[-1]), 29, 21)
    unmerged = pack_per_turn(trajectory, 0, places_of(trajectory))
    assert sum(map(len, unmerged)) == sum(5 * turn for turn in range(1, 11))  # control: the cost without merging


def test_a_rewritten_context_starts_a_new_sequence(make: Any) -> None:
    turns = [make.turn(0, [1, 2], [3]), make.turn(1, [4], [5])]
    first, second = pack_prefix_tree(make.trajectory(turns), 0, [TurnPlace(0, 0), TurnPlace(1, 1)])
    assert first.ids.tolist() == [1, 2, 3] and second.ids.tolist() == [4, 5]


def test_causal_packing_packs_branches_per_turn_and_keeps_chains_whole(make: Any) -> None:
    chain = make.trajectory(make.chain(([1], [2]), ([3], [4])))
    tree = make.trajectory([*chain.turns, make.turn(2, [5], [6], parent=0)])
    assert len(pack_causal(chain, 0, places_of(chain))) == 1
    assert [len(sequence) for sequence in pack_causal(tree, 0, places_of(tree))] == [2, 4, 4]


@given(trees())
@settings(max_examples=100, deadline=None)
def test_every_state_after_an_action_follows_its_prompt_and_action(trajectory: Trajectory) -> None:
    places = places_of(trajectory)
    expected = {
        place.turn: list(trajectory.prompt_ids(turn) + turn.action_ids)
        for turn, place in zip(trajectory.turns, places, strict=True)
        if turn.action_ids
    }
    for packing in (pack_prefix_tree, pack_per_turn, pack_causal):
        found = [
            (int(turn), visible(sequence, int(end)))
            for sequence in packing(trajectory, 0, places)
            for end, turn in zip(sequence.post_action_states, sequence.turns, strict=True)
        ]
        assert len(found) == len(expected) and dict(found) == expected


def test_observed_tokens_of_the_batch_are_predicted_too(make: Any) -> None:
    trajectory = make.trajectory(make.chain(([1, 2], [3, 4]), ([5, 6, 7], [8])))
    places = [TurnPlace(0, 0), TurnPlace(1, 5, observation=2)]  # batch: 3 4 | 5 6 7 | 8
    for packing in (pack_prefix_tree, pack_per_turn):
        predicted = {
            int(token): int(sequence.ids[position])
            for sequence in packing(trajectory, 0, places)
            for token, position in zip(sequence.tokens, sequence.logit_positions, strict=True)
        }
        assert predicted == {0: 2, 1: 3, 2: 4, 3: 5, 4: 6, 5: 7}
