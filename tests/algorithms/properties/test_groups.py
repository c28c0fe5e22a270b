"""P6: identities of group-relative advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from ragged import EPISODES, Episodes, TurnSpec, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import center, leave_one_out, standardize
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch, assemble_batch, index_within, segment_count, segment_mean, segment_sum
from agent_r1.data.sequences import pack_prefix_tree

Relative = Callable[[Tensor, Tensor], Tensor]
"""(returns (N,), group of each (N,)) -> advantages (N,)."""


def _attempts(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    key, quarters = torch.tensor(pairs).T
    return quarters.double() / 4, key


RETURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(-4, 4)), min_size=1, max_size=12).map(_attempts)
BINARY = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 4])), min_size=1, max_size=12).map(_attempts)


def grpo(x: Tensor, key: Tensor) -> Tensor:
    return standardize(x, key, 1e-6)


def _with(deviation: Callable[[Tensor], Tensor], epsilon: float) -> Relative:
    """Return (x - mean) / (deviation + epsilon) group by group, without a guard for constant groups."""

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
    """Wrong: a group of one has mean 0 and deviation 1, so A = R: verl."""
    return torch.where(segment_count(key)[key] == 1, x / (1 + 1e-6), grpo(x, key))


def over_the_batch(x: Tensor, key: Tensor) -> Tensor:
    """Wrong: compared with the whole batch."""
    return grpo(x, torch.zeros_like(key))


def without_own_weight(x: Tensor, key: Tensor) -> Tensor:
    """Wrong: the sum of the others is divided by the size of the whole group."""
    count = segment_count(key)[key]
    return x - (segment_sum(x, key)[key] - x) / count


def leave_one_out_equals_scaled_centering(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    x, key = attempts
    count = segment_count(key)[key].double()
    assert close(relative(x, key), center(x, key) * count / (count - 1).clamp(min=1))
    for place in range(len(x)):
        others = (key == key[place]).index_fill(0, torch.tensor([place]), False)
        assert not others.any() or close(relative(x, key)[place], x[place] - x[others].mean())


def sums_to_zero_in_each_group(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    assert segment_sum(relative(*attempts), attempts[1]).abs().max() < 1e-9


def is_invariant_to_scale_and_offset(relative: Relative, attempts: tuple[Tensor, Tensor], scale: float) -> None:
    """Except for epsilon."""
    x, key = attempts
    assert close(relative(scale * x + 3.0, key), relative(x, key), 1e-4)


def is_symmetric_in_a_group_of_two(relative: Relative, one: float, other: float) -> None:
    found = relative(torch.tensor([one, other]).double() / 4, torch.tensor([0, 0]))
    expected = torch.tensor([one - other, other - one]).double().sign() * 0.5**0.5
    assert close(found, expected, 1e-4)


def has_the_closed_form_for_binary_rewards(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    """sqrt((1-p)/p) for a success, -sqrt(p/(1-p)) for a failure, times Bessel's sqrt((G-1)/G)."""
    x, key = attempts
    p, count = segment_mean(x, key)[key], segment_count(key)[key]
    odds = torch.where(x > 0, (1 - p) / p, p / (1 - p)).sqrt() * torch.where(x > 0, 1.0, -1.0)
    expected = torch.where((p > 0) & (p < 1), odds * ((count - 1) / count).sqrt(), 0.0)
    assert close(relative(x, key), expected, 1e-4)


def is_exactly_zero_without_comparison(relative: Relative, attempts: tuple[Tensor, Tensor]) -> None:
    """A group of equal returns, float noise included, and a group of one."""
    x, key = attempts
    constant = 0.3 + segment_mean(x, key)[key] + 1e-16 * torch.arange(len(x))
    assert relative(constant, key).count_nonzero() == 0
    single = segment_count(key)[key] == 1
    assert relative(x, key)[single].count_nonzero() == 0


CLAIMS = [
    (leave_one_out_equals_scaled_centering, [leave_one_out], without_own_weight, (RETURNS,)),
    (sums_to_zero_in_each_group, [center, leave_one_out, grpo], over_the_batch, (RETURNS,)),
    (is_invariant_to_scale_and_offset, [grpo], with_large_epsilon, (RETURNS, st.sampled_from([0.5, 7.0]))),
    (is_symmetric_in_a_group_of_two, [grpo], without_bessel, (st.integers(-4, 4), st.integers(-4, 4))),
    (has_the_closed_form_for_binary_rewards, [grpo], without_bessel, (BINARY,)),
    (is_exactly_zero_without_comparison, [center, leave_one_out, grpo], guarded_by_epsilon_only, (RETURNS,)),
    (is_exactly_zero_without_comparison, [], singleton_keeps_its_return, (RETURNS,)),
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


# the number of turns of a trajectory does not change its weight

AdvantageFn = Callable[[TrainingBatch], Tensor]
TRAJECTORY_LEVEL = [ALGORITHMS[name] for name in ("grpo", "dr-grpo", "rloo", "maxrl", "lite-ppo", "gpg")]


def split_turn(turn: TurnSpec) -> tuple[TurnSpec, ...]:
    """Return the same tokens and rewards as turns of one token each."""
    if len(turn.action) == 1:
        return (turn,)
    pieces = [replace(turn, action=(one,), reward=0.0, call_reward=0.0) for one in turn.action]
    return (replace(pieces[0], call_reward=turn.call_reward), *pieces[1:-1], replace(pieces[-1], reward=turn.reward))


def with_first_attempts_split(episodes: Episodes) -> Episodes:
    """Return the episodes with the first attempt of each group in turns of one token each."""
    return tuple(
        replace(
            group,
            attempts=(
                replace(
                    group.attempts[0], turns=tuple(one for turn in group.attempts[0].turns for one in split_turn(turn))
                ),
                *group.attempts[1:],
            ),
        )
        for group in episodes
    )


def does_not_depend_on_the_number_of_turns(advantage_of: AdvantageFn, episodes: Episodes) -> None:
    joined = assemble_batch(samples(episodes), pack_prefix_tree)
    split = assemble_batch(samples(with_first_attempts_split(episodes)), pack_prefix_tree)
    assert close(advantage_of(joined), advantage_of(split))


def over_turns(batch: TrainingBatch) -> Tensor:
    """Wrong: mean and deviation over a group's turns, each with its trajectory's return: long ones weigh more."""
    return grpo(batch.returns[batch.turn_trajectory], batch.turn_group)[batch.token_turn]


@pytest.mark.parametrize("algorithm", TRAJECTORY_LEVEL, ids=lambda algorithm: algorithm.name)
def test_trajectory_level_advantages_do_not_depend_on_the_number_of_turns(algorithm: Algorithm) -> None:
    holds(
        does_not_depend_on_the_number_of_turns,
        lambda batch: algorithm.advantage.compute(batch, ModelOutputs()),
        EPISODES,
        count=5,
    )


def test_statistics_over_turns_are_detected() -> None:
    rejected(does_not_depend_on_the_number_of_turns, over_turns, EPISODES)


# other groups do not matter

WHITENED = ("reinforce++-baseline", "lite-ppo", "gdpo", "gpg")
"""Algorithms that scale by the whole batch, on purpose."""
WITHIN_GROUPS = [
    algorithm
    for algorithm in {type(one.advantage): one for one in ALGORITHMS.values() if one.name not in WHITENED}.values()
    if "group" in algorithm.needs
]


def does_not_depend_on_other_groups(advantage_of: AdvantageFn, episodes: Episodes) -> None:
    together, alone = (assemble_batch(samples(given), pack_prefix_tree) for given in (episodes, episodes[:1]))
    assert close(advantage_of(together)[: len(alone.ids)], advantage_of(alone))


@pytest.mark.parametrize("algorithm", WITHIN_GROUPS, ids=lambda algorithm: algorithm.name)
def test_advantages_do_not_depend_on_other_groups(algorithm: Algorithm) -> None:
    holds(
        does_not_depend_on_other_groups,
        lambda batch: algorithm.advantage.compute(batch, ModelOutputs()),
        EPISODES,
        count=6,
    )


def same_turns_of_all_groups(batch: TrainingBatch) -> Tensor:
    """Wrong: turns of the same number are compared across tasks."""
    return grpo(batch.turn_rewards, index_within(batch.turn_trajectory))[batch.token_turn]


def test_a_comparison_with_other_groups_is_detected() -> None:
    rejected(does_not_depend_on_other_groups, same_turns_of_all_groups, EPISODES)
    for name in WHITENED[:2]:
        rejected(
            does_not_depend_on_other_groups,
            lambda batch, algorithm=ALGORITHMS[name]: algorithm.advantage.compute(batch, ModelOutputs()),
            EPISODES,
        )
