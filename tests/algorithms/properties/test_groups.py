"""P6: identities of estimators that compare the attempts at one task with each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from ragged import EPISODES, Episodes, Lived, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops.group_stats import center, center_weighted, leave_one_out, over_mean, standardize
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.signals import ModelOutputs
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import places_within, segment_count, segment_mean, segment_sum
from agent_r1.data.sequences import pack_prefix_tree

Relative = Callable[[Tensor, Tensor], Tensor]
"""(returns, group of each), both (N,) -> advantages (N,)."""


def _attempts(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    key, quarters = torch.tensor(pairs).T
    return quarters.double() / 4, key


RETURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(-4, 4)), min_size=1, max_size=12).map(_attempts)
BINARY = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 4])), min_size=1, max_size=12).map(_attempts)


def grpo(x: Tensor, key: Tensor) -> Tensor:
    return standardize(x, key, 1e-6)


def _with(deviation: Callable[[Tensor], Tensor], epsilon: float) -> Relative:
    """(x - mean) / (deviation + epsilon) group by group, without a guard."""

    def relative(x: Tensor, key: Tensor) -> Tensor:
        advantage = torch.empty_like(x)
        for group in key.unique():
            member = x[key == group]
            advantage[key == group] = (member - member.mean()) / (deviation(member) + epsilon)
        return advantage

    return relative


def sample_deviation(member: Tensor) -> Tensor:
    return member.std() if len(member) > 1 else torch.zeros(()).double()


guarded_by_epsilon_only = _with(sample_deviation, 1e-6)
without_bessel = _with(lambda member: member.std(correction=0), 1e-6)
with_large_epsilon = _with(sample_deviation, 0.1)


def singleton_keeps_its_return(x: Tensor, key: Tensor) -> Tensor:
    """Wrong: in a group of one mean 0 and deviation 1 are assumed, so A = R: verl."""
    return torch.where(segment_count(key)[key] == 1, x / (1 + 1e-6), grpo(x, key))


def over_the_batch(x: Tensor, key: Tensor) -> Tensor:
    """Wrong: compared with everyone."""
    return grpo(x, torch.zeros_like(key))


def without_own_weight(x: Tensor, key: Tensor) -> Tensor:
    """Wrong: the others' sum is divided by all, not by the others."""
    count = segment_count(key)[key]
    return x - (segment_sum(x, key)[key] - x) / count


def leave_one_out_is_scaled_centring(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    x, key = attempts
    count = segment_count(key)[key].double()
    assert close(relative(x, key), center(x, key) * count / (count - 1).clamp(min=1))
    for place in range(len(x)):
        others = (key == key[place]).index_fill(0, torch.tensor([place]), False)
        assert not others.any() or close(relative(x, key)[place], x[place] - x[others].mean())


def a_group_sums_to_nothing(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    assert segment_sum(relative(*attempts), attempts[1]).abs().max() < 1e-9


def scale_and_offset_do_not_matter(relative: Relative, attempts: tuple[Tensor, Tensor], scale: float) -> None:
    """But for epsilon."""
    x, key = attempts
    assert close(relative(scale * x + 3.0, key), relative(x, key), 1e-4)


def of_two_one_is_as_good_as_the_other_is_bad(relative: Relative, one: float, other: float) -> None:
    found = relative(torch.tensor([one, other]).double() / 4, torch.tensor([0, 0]))
    expected = torch.tensor([one - other, other - one]).double().sign() * 0.5**0.5
    assert close(found, expected, 1e-4)


def binary_rewards_have_a_closed_form(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    """sqrt((1-p)/p) for a success, -sqrt(p/(1-p)) for a failure, times Bessel's sqrt((G-1)/G)."""
    x, key = attempts
    p, count = segment_mean(x, key)[key], segment_count(key)[key]
    odds = torch.where(x > 0, (1 - p) / p, p / (1 - p)).sqrt() * torch.where(x > 0, 1.0, -1.0)
    expected = torch.where((p > 0) & (p < 1), odds * ((count - 1) / count).sqrt(), 0.0)
    assert close(relative(x, key), expected, 1e-4)


def nothing_to_compare_is_exactly_nothing(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    """A group that earned the same, float noise included, and a group of one."""
    x, key = attempts
    alike = 0.3 + segment_mean(x, key)[key] + 1e-16 * torch.arange(len(x))
    assert relative(alike, key).count_nonzero() == 0
    lone = segment_count(key)[key] == 1
    assert relative(x, key)[lone].count_nonzero() == 0


CLAIMS = [
    (leave_one_out_is_scaled_centring, [leave_one_out], without_own_weight, (RETURNS,)),
    (a_group_sums_to_nothing, [center, leave_one_out, grpo], over_the_batch, (RETURNS,)),
    (scale_and_offset_do_not_matter, [grpo], with_large_epsilon, (RETURNS, st.sampled_from([0.5, 7.0]))),
    (of_two_one_is_as_good_as_the_other_is_bad, [grpo], without_bessel, (st.integers(-4, 4), st.integers(-4, 4))),
    (binary_rewards_have_a_closed_form, [grpo], without_bessel, (BINARY,)),
    (nothing_to_compare_is_exactly_nothing, [center, leave_one_out, grpo], guarded_by_epsilon_only, (RETURNS,)),
    (nothing_to_compare_is_exactly_nothing, [], singleton_keeps_its_return, (RETURNS,)),
]


@pytest.mark.parametrize(
    ("claim", "right", "wrong", "examples"), CLAIMS, ids=lambda part: getattr(part, "__name__", "")
)
def test_relative_advantages(
    claim: Callable[..., None], right: list[Relative], wrong: Relative, examples: tuple
) -> None:
    for relative in right:
        holds(claim, relative, *examples)
    rejected(claim, wrong, *examples)


def equal_weights_are_no_weights(weighted: Callable[[Tensor, Tensor, Tensor], Tensor], attempts: tuple) -> None:
    x, key = attempts
    assert close(weighted(x, key, torch.full_like(x, 3.0)), center(x, key))


def test_opo_at_equal_lengths_is_dr_grpo() -> None:
    holds(equal_weights_are_no_weights, center_weighted, RETURNS)
    rejected(
        equal_weights_are_no_weights, lambda x, key, weight: x - segment_sum(weight * x, key)[key] / weight, RETURNS
    )


def maxrl_has_a_closed_form(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    """(1-p)/p for a success, -1 for a failure; nothing where all or none succeeded (2602.02710)."""
    x, key = attempts
    p = segment_mean(x, key)[key]
    expected = torch.where((p > 0) & (p < 1), torch.where(x > 0, (1 - p) / p, -1.0), 0.0)
    assert close(relative(x, key), expected)


def test_maxrl_of_binary_rewards() -> None:
    holds(maxrl_has_a_closed_form, lambda x, key: over_mean(center(x, key), x, key), BINARY)
    rejected(maxrl_has_a_closed_form, grpo, BINARY)


# a trajectory counts once, however many turns it has

Assign = Callable[[TrainingBatch], Tensor]
BY_TRAJECTORY = [row for row in ALGORITHMS.values() if isinstance(row.advantage, GroupRelative) and row.name != "opo"]


def split_in_turns(turn: Lived) -> tuple[Lived, ...]:
    """The same tokens and rewards, as turns of one token each."""
    pieces = [replace(turn, said=(one,), reward=0.0, call_reward=0.0) for one in turn.said]
    return (replace(pieces[0], call_reward=turn.call_reward), *pieces[1:-1], replace(pieces[-1], reward=turn.reward))


def first_attempts_split(episodes: Episodes) -> Episodes:
    """The first attempt of each group in turns of one token each."""
    return tuple(
        replace(
            group,
            attempts=(
                replace(group.attempts[0], turns=tuple(one for turn in group.attempts[0].turns for one in split(turn))),
                *group.attempts[1:],
            ),
        )
        for group in episodes
    )


def split(turn: Lived) -> tuple[Lived, ...]:
    return split_in_turns(turn) if len(turn.said) > 1 else (turn,)


def a_trajectory_counts_once(assign: Assign, episodes: Episodes) -> None:
    whole = assemble(samples(episodes), pack_prefix_tree)
    apart = assemble(samples(first_attempts_split(episodes)), pack_prefix_tree)
    assert close(assign(whole), assign(apart))


def over_rows_of_turns(batch: TrainingBatch) -> Tensor:
    """Wrong: mean and deviation over a group's turns, each with its trajectory's return: long ones count more."""
    return grpo(batch.returns[batch.turn_trajectory], batch.turn_group)[batch.token_turn]


@pytest.mark.parametrize("row", BY_TRAJECTORY, ids=lambda row: row.name)
def test_a_trajectory_counts_once(row: Algorithm) -> None:
    holds(a_trajectory_counts_once, lambda batch: row.credit(batch, ModelOutputs()).advantage, EPISODES, count=5)


def test_statistics_over_turns_are_seen() -> None:
    rejected(a_trajectory_counts_once, over_rows_of_turns, EPISODES)


# a group is compared with nobody else

WHITENED = ("reinforce++-baseline", "lite-ppo", "gdpo")
"""What is scaled by the whole batch, on purpose."""
WITHIN_GROUPS = [row for row in ALGORITHMS.values() if "group" in row.needs and row.name not in WHITENED]


def other_groups_do_not_matter(assign: Assign, episodes: Episodes) -> None:
    together, alone = (assemble(samples(given), pack_prefix_tree) for given in (episodes, episodes[:1]))
    assert close(assign(together)[: len(alone.ids)], assign(alone))


@pytest.mark.parametrize("row", WITHIN_GROUPS, ids=lambda row: row.name)
def test_other_groups_move_no_credit(row: Algorithm) -> None:
    holds(other_groups_do_not_matter, lambda batch: row.credit(batch, ModelOutputs()).advantage, EPISODES, count=6)


def same_turns_of_everyone(batch: TrainingBatch) -> Tensor:
    """Wrong: turns of the same number are compared whatever the task was."""
    return grpo(batch.turn_rewards, places_within(batch.turn_trajectory))[batch.token_turn]


def test_a_comparison_with_other_groups_is_seen() -> None:
    rejected(other_groups_do_not_matter, same_turns_of_everyone, EPISODES)
    for name in WHITENED:
        rejected(
            other_groups_do_not_matter, lambda batch, row=ALGORITHMS[name]: row.credit(batch, ModelOutputs()).advantage, EPISODES
        )
