"""P2 and P3: GAE at its limits, truncation, and turns of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from learning import bootstrapped, close, discounted
from ragged import EPISODES, Episodes, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.ops import center, discounted_sums, generalized_advantages
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.data.batch import TrainingBatch, assemble_batch, segment_last, segment_mean, segment_sum
from agent_r1.data.sequences import pack_prefix_tree

Gae = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]
"""(rewards (N,), values (N,), final values (units,), unit (N,), gamma, lambda) -> advantages (N,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Episodes of given lengths with random rewards and values (N,); ``other`` (N,) are further random numbers."""

    unit: Tensor
    rewards: Tensor
    values: Tensor
    other: Tensor

    @property
    def is_last(self) -> Tensor:
        return torch.zeros(len(self.unit), dtype=torch.bool).index_fill(0, segment_last(self.unit), True)

    @property
    def zeros(self) -> Tensor:
        """Final values (units,) of episodes that terminated."""
        return torch.zeros(int(self.unit[-1]) + 1, dtype=torch.float64)

    def final(self, x: Tensor) -> Tensor:
        """Return the numbers of the last elements: (N,) -> (units,)."""
        return x[segment_last(self.unit)]


def _chains(lengths: list[int], seed: int) -> Chains:
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Chains(unit, *torch.randn(3, len(unit), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


CHAINS = st.builds(_chains, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 999))
DISCOUNT = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def equals_return_minus_value_at_one(gae: Gae, chains: Chains) -> None:
    found = gae(chains.rewards, chains.values, chains.zeros, chains.unit, 1.0, 1.0)
    assert close(found, discounted_sums(chains.rewards, chains.unit, 1.0) - chains.values)


def equals_one_step_error_at_lambda_zero(gae: Gae, chains: Chains, gamma: float) -> None:
    found = gae(chains.rewards, chains.values, chains.zeros, chains.unit, gamma, 0.0)
    next_values = torch.where(chains.is_last, 0.0, chains.values.roll(-1))
    assert close(found, chains.rewards + gamma * next_values - chains.values)


def equals_dr_grpo_with_the_group_mean_as_value(gae: Gae, chains: Chains) -> None:
    group = torch.zeros(int(chains.unit[-1]) + 1, dtype=torch.int64)
    outcomes = segment_sum(chains.rewards, chains.unit)
    rewards = torch.where(chains.is_last, outcomes[chains.unit], 0.0)
    values = segment_mean(outcomes, group)[group][chains.unit]
    expected = center(outcomes, group)[chains.unit] if len(group) > 1 else torch.zeros_like(rewards)
    assert close(gae(rewards, values, chains.zeros, chains.unit, 1.0, 1.0), expected)


def is_unchanged_by_a_potential_that_the_critic_knows(gae: Gae, chains: Chains, gamma: float, lam: float) -> None:
    """Rewards r + gamma phi' - phi with values V - phi (Ng et al. 1999); a terminal state has potential 0."""
    potential = chains.other
    next_potential = torch.where(chains.is_last, 0.0, potential.roll(-1))
    plain = gae(chains.rewards, chains.values, chains.zeros, chains.unit, gamma, lam)
    rewards = chains.rewards + gamma * next_potential - potential
    assert close(gae(rewards, chains.values - potential, chains.zeros, chains.unit, gamma, lam), plain)


def equals_a_loop(gae: Gae, chains: Chains, gamma: float, lam: float) -> None:
    expected = torch.zeros_like(chains.rewards)
    final = chains.final(chains.other)
    for j in reversed(range(len(expected))):
        last = bool(chains.is_last[j])
        next_value, carried = (final[chains.unit[j]], 0.0) if last else (chains.values[j + 1], expected[j + 1])
        expected[j] = chains.rewards[j] + gamma * next_value - chains.values[j] + gamma * lam * carried
    assert close(gae(chains.rewards, chains.values, final, chains.unit, gamma, lam), expected)


def never_terminal(rewards: Tensor, values: Tensor, final: Tensor, unit: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: a terminal state has the value of the state before it, as if V(T+1) were read from padding."""
    return generalized_advantages(rewards, values, values[segment_last(unit)], unit, gamma, lam)


def undiscounted(rewards: Tensor, values: Tensor, final: Tensor, unit: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: the next value is not discounted."""
    errors = generalized_advantages(rewards, values, final, unit, 1.0, 0.0)
    return discounted_sums(errors, unit, gamma * lam)


def across_episodes(rewards: Tensor, values: Tensor, final: Tensor, unit: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: the next element in memory is taken for the next in time, also after the end of an episode."""
    return generalized_advantages(rewards, values, final[-1:], torch.zeros_like(unit), gamma, lam)


CLAIMS = [
    (equals_return_minus_value_at_one, never_terminal, (CHAINS,)),
    (equals_one_step_error_at_lambda_zero, undiscounted, (CHAINS, DISCOUNT)),
    (equals_dr_grpo_with_the_group_mean_as_value, never_terminal, (CHAINS,)),
    (is_unchanged_by_a_potential_that_the_critic_knows, undiscounted, (CHAINS, DISCOUNT, DISCOUNT)),
    (equals_a_loop, across_episodes, (CHAINS, DISCOUNT, DISCOUNT)),
]


@pytest.mark.parametrize(("claim", "wrong", "examples"), CLAIMS, ids=[claim.__name__ for claim, _, _ in CLAIMS])
def test_generalized_advantages(claim: Callable[..., None], wrong: Gae, examples: tuple) -> None:
    holds(claim, generalized_advantages, *examples)
    rejected(claim, wrong, *examples)


# truncated episodes

CRITICS = [discounted(ALGORITHMS[name]) for name in ("ppo", "ppo-turn", "vapo", "bi-level-gae")]
SEEDS = st.integers(0, 99)


def random_outputs(batch: TrainingBatch, seed: int) -> ModelOutputs:
    """Return random values of a critic for all tokens and turns."""
    tokens, turns = len(batch.ids), len(batch.turn_trajectory)
    values = torch.randn(tokens + turns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return ModelOutputs(values=StateValues(values[:tokens], values[tokens:]))


def truncation_equals_a_reward_of_the_next_value(algorithm: Algorithm, episodes: Episodes, seed: int) -> None:
    """An episode truncated in a state of value V has the advantages of one with a reward of gamma V there that
    ended."""
    batch = assemble_batch(samples(episodes), pack_prefix_tree)
    outputs = random_outputs(batch, seed)
    assert outputs.values is not None
    gamma = dict(algorithm.advantage).get("turn_gamma", dict(algorithm.advantage)["gamma"])
    reward = torch.where(batch.truncated, gamma * outputs.values.after_action[batch.last_turns], 0.0)
    terminated = replace(
        batch,
        truncated=torch.zeros_like(batch.truncated),
        outcome_rewards=batch.outcome_rewards + reward,
        token_rewards=batch.token_rewards.index_add(0, batch.last_tokens, reward),
    )
    found = algorithm.compute_token_weights(batch, outputs)
    expected = algorithm.compute_token_weights(terminated, outputs)
    assert found.value_targets is not None and expected.value_targets is not None
    assert close(found.advantage, expected.advantage)
    assert close(found.value_targets.target.before_token, expected.value_targets.target.before_token)


@pytest.mark.parametrize("algorithm", CRITICS, ids=lambda algorithm: algorithm.name)
def test_bootstrapping_continues_a_truncated_episode(algorithm: Algorithm) -> None:
    holds(truncation_equals_a_reward_of_the_next_value, bootstrapped(algorithm), EPISODES, SEEDS, count=8)
    rejected(truncation_equals_a_reward_of_the_next_value, algorithm, EPISODES, SEEDS)  # as if it had terminated


# turns and tokens

Estimator = Callable[[TrainingBatch, ModelOutputs], Tensor]
"""Returns the advantages (N,)."""

ONE_TOKEN_TURNS = EPISODES.map(
    lambda episodes: tuple(
        replace(
            group,
            attempts=tuple(
                replace(attempt, turns=tuple(replace(turn, action=turn.action[:1]) for turn in attempt.turns))
                for attempt in group.attempts
            ),
        )
        for group in episodes
    )
)
PPO = bootstrapped(discounted(ALGORITHMS["ppo"]))


def equals_token_gae_for_turns_of_one_token(estimator: Estimator, episodes: Episodes, seed: int) -> None:
    batch = assemble_batch(samples(episodes), pack_prefix_tree)
    outputs = random_outputs(batch, seed)
    assert close(estimator(batch, outputs), PPO.compute_token_weights(batch, outputs).advantage)


def estimator_of(name: str, **settings: float) -> Estimator:
    algorithm = bootstrapped(ALGORITHMS[name])
    advantage = algorithm.advantage.model_copy(update={"gamma": 0.9, "lam": 0.8, **settings})
    changed = algorithm.model_copy(update={"advantage": advantage})
    return lambda batch, outputs: changed.compute_token_weights(batch, outputs).advantage


def turns_inferred_from_rewards(batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
    """Wrong: a turn ends at a reward that is not 0, so that turns without reward merge into the next: RAGEN."""
    ends = (batch.turn_rewards != 0).index_fill(0, batch.last_turns, True)
    merged = torch.cat([torch.zeros(1, dtype=torch.int64), ends.cumsum(0)[:-1]])
    last = ends.nonzero().squeeze(1)
    inferred = replace(batch, token_turn=merged[batch.token_turn], turn_trajectory=batch.turn_trajectory[last])
    assert outputs.values is not None
    values = replace(outputs.values, after_action=outputs.values.after_action[last])
    return estimator_of("ppo-turn")(inferred, replace(outputs, values=values))


def test_turns_of_one_token_are_tokens() -> None:
    for name, settings in (("ppo-turn", {}), ("steppo", {}), ("turn-ppo", {}), ("bi-level-gae", {"turn_gamma": 0.9})):
        estimator = estimator_of(name, **settings)
        holds(equals_token_gae_for_turns_of_one_token, estimator, ONE_TOKEN_TURNS, SEEDS, count=8)


def test_turns_inferred_from_rewards_are_detected() -> None:
    rejected(equals_token_gae_for_turns_of_one_token, turns_inferred_from_rewards, ONE_TOKEN_TURNS, SEEDS)
