"""P2 and P3: what generalised advantages are at their limits, and that turns of one token are tokens."""

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
from agent_r1.algorithms.ops.group_stats import center
from agent_r1.algorithms.ops.returns import discounted_sums, generalized_advantages
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.signals import ModelOutputs
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import previous_within, segment_mean, segment_sum
from agent_r1.data.sequences import pack_prefix_tree

Gae = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]
"""(rewards, values, value after each end, the element before each, gamma, lambda) -> advantages, all (N,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Episodes of these lengths with random rewards and values."""

    unit: Tensor
    rewards: Tensor
    values: Tensor
    other: Tensor

    @property
    def before(self) -> Tensor:
        return previous_within(self.unit)

    @property
    def last(self) -> Tensor:
        return self.unit != torch.cat([self.unit[1:], torch.tensor([-1])])


def _chains(lengths: list[int], seed: int) -> Chains:
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Chains(unit, *torch.randn(3, len(unit), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


CHAINS = st.builds(_chains, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 999))
DISCOUNT = st.sampled_from([0.0, 0.5, 0.9, 1.0])
NONE = 0.0


def at_one_it_is_return_minus_value(gae: Gae, chains: Chains) -> None:
    found = gae(chains.rewards, chains.values, NONE * chains.values, chains.before, 1.0, 1.0)
    assert close(found, discounted_sums(chains.rewards, chains.before, 1.0) - chains.values)


def without_lambda_it_is_the_one_step_error(gae: Gae, chains: Chains, gamma: float) -> None:
    found = gae(chains.rewards, chains.values, NONE * chains.values, chains.before, gamma, 0.0)
    following = torch.where(chains.last, NONE, chains.values.roll(-1))
    assert close(found, chains.rewards + gamma * following - chains.values)


def with_the_groups_mean_as_value_it_is_dr_grpo(gae: Gae, chains: Chains) -> None:
    group = torch.zeros(int(chains.unit[-1]) + 1, dtype=torch.int64)
    outcomes = segment_sum(chains.rewards, chains.unit)
    rewards = torch.where(chains.last, outcomes[chains.unit], NONE)
    values = segment_mean(outcomes, group)[group][chains.unit]
    expected = center(outcomes, group)[chains.unit] if len(group) > 1 else torch.zeros_like(rewards)
    assert close(gae(rewards, values, NONE * values, chains.before, 1.0, 1.0), expected)


def is_linear(gae: Gae, chains: Chains, gamma: float, lam: float) -> None:
    one = gae(chains.rewards, chains.values, chains.other, chains.before, gamma, lam)
    other = gae(chains.other, chains.rewards, chains.values, chains.before, gamma, lam)
    rewards, values = 2 * chains.rewards - 3 * chains.other, 2 * chains.values - 3 * chains.rewards
    mixed = gae(rewards, values, 2 * chains.other - 3 * chains.values, chains.before, gamma, lam)
    assert close(mixed, 2 * one - 3 * other)


def a_potential_that_the_critic_knows_changes_nothing(gae: Gae, chains: Chains, gamma: float, lam: float) -> None:
    """Rewards r + gamma phi' - phi with values V - phi (Ng et al. 1999); an ending has potential 0."""
    potential, ended = chains.other, NONE * chains.values
    following = torch.where(chains.last, NONE, potential.roll(-1))
    plain = gae(chains.rewards, chains.values, ended, chains.before, gamma, lam)
    rewards = chains.rewards + gamma * following - potential
    assert close(gae(rewards, chains.values - potential, ended, chains.before, gamma, lam), plain)


def endless(rewards: Tensor, values: Tensor, after: Tensor, before: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: an ending is followed by its own value again, as where V(T+1) is read from padding."""
    return generalized_advantages(rewards, values, values, before, gamma, lam)


def undiscounted(rewards: Tensor, values: Tensor, after: Tensor, before: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: gamma is missing at the next value."""
    errors = generalized_advantages(rewards, values, after, before, 1.0, 0.0)
    return discounted_sums(errors, before, gamma * lam)


def whitened(rewards: Tensor, values: Tensor, after: Tensor, before: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: whitened inside, so that the critic's targets A + V would be too."""
    advantage = generalized_advantages(rewards, values, after, before, gamma, lam)
    return (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)


CLAIMS = [
    (at_one_it_is_return_minus_value, endless, (CHAINS,)),
    (without_lambda_it_is_the_one_step_error, undiscounted, (CHAINS, DISCOUNT)),
    (with_the_groups_mean_as_value_it_is_dr_grpo, endless, (CHAINS,)),
    (is_linear, whitened, (CHAINS, DISCOUNT, DISCOUNT)),
    (a_potential_that_the_critic_knows_changes_nothing, undiscounted, (CHAINS, DISCOUNT, DISCOUNT)),
]


@pytest.mark.parametrize(("claim", "wrong", "examples"), CLAIMS, ids=[claim.__name__ for claim, _, _ in CLAIMS])
def test_generalised_advantages(claim: Callable[..., None], wrong: Gae, examples: tuple) -> None:
    holds(claim, generalized_advantages, *examples)
    rejected(claim, wrong, *examples)


# where an episode was cut

CRITICS = [discounted(row) for row in ALGORITHMS.values() if "critic" in row.needs]
SEEDS = st.integers(0, 99)


def said(batch: TrainingBatch, seed: int) -> ModelOutputs:
    """A critic's word on all tokens and turns."""
    tokens, turns = len(batch.ids), len(batch.turn_trajectory)
    values = torch.randn(tokens + turns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return ModelOutputs(values=values[:tokens], ends=values[tokens:])


def a_cut_is_worth_the_state_it_leads_to(row: Algorithm, episodes: Episodes, seed: int) -> None:
    """An episode cut in a state of value V has the credit of one that earned gamma V there and ended."""
    batch = assemble(samples(episodes), pack_prefix_tree)
    signals = said(batch, seed)
    assert signals.ends is not None
    gamma = dict(row.advantage).get("turn_gamma", dict(row.advantage)["gamma"])
    worth = torch.where(batch.truncated, gamma * signals.ends[batch.last_turns], NONE)
    paid = replace(
        batch,
        truncated=torch.zeros_like(batch.truncated),
        outcomes=batch.outcomes + worth,
        token_rewards=batch.token_rewards.index_add(0, batch.last_tokens, worth),
    )
    cut, ended = row.credit(batch, signals), row.credit(paid, signals)
    assert cut.targets is not None and ended.targets is not None
    assert close(cut.advantage, ended.advantage)
    assert close(cut.targets.tokens, ended.targets.tokens)


@pytest.mark.parametrize("row", CRITICS, ids=lambda row: row.name)
def test_a_critic_can_go_on_where_an_episode_was_cut(row: Algorithm) -> None:
    holds(a_cut_is_worth_the_state_it_leads_to, bootstrapped(row), EPISODES, SEEDS, count=8)


@pytest.mark.parametrize("row", CRITICS, ids=lambda row: row.name)
def test_a_cut_taken_for_an_ending_is_seen(row: Algorithm) -> None:
    rejected(a_cut_is_worth_the_state_it_leads_to, row, EPISODES, SEEDS)


# turns and tokens

ONE_TOKEN_TURNS = EPISODES.map(
    lambda episodes: tuple(
        replace(
            compared,
            attempts=tuple(
                replace(attempt, turns=tuple(replace(turn, said=turn.said[:1]) for turn in attempt.turns))
                for attempt in compared.attempts
            ),
        )
        for compared in episodes
    )
)
TOKENS = bootstrapped(discounted(ALGORITHMS["ppo"]))


def turns_of_one_token_are_tokens(assign: Callable[[TrainingBatch, ModelOutputs], Tensor], episodes: Episodes, seed: int) -> None:
    batch = assemble(samples(episodes), pack_prefix_tree)
    signals = said(batch, seed)
    assert close(assign(batch, signals), TOKENS.credit(batch, signals).advantage)


def assigns(name: str, **numbers: float) -> Callable[[TrainingBatch, ModelOutputs], Tensor]:
    row = bootstrapped(ALGORITHMS[name])
    advantage = row.advantage.model_copy(update={"gamma": 0.9, "lam": 0.8, **numbers})
    return lambda batch, signals: row.model_copy(update={"advantage": advantage}).credit(batch, signals).advantage


def turns_by_reward(batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
    """Wrong: a turn ends where a reward is not 0, so that unrewarded turns melt into the next: RAGEN's bi-level."""
    ends = (batch.turn_rewards != 0).index_fill(0, batch.last_turns, True)
    melted = torch.cat([torch.zeros(1, dtype=torch.int64), ends.cumsum(0)[:-1]])
    last = ends.nonzero().squeeze(1)
    guessed = replace(batch, token_turn=melted[batch.token_turn], turn_trajectory=batch.turn_trajectory[last])
    ends_of = None if signals.ends is None else signals.ends[last]
    return assigns("ppo-turn")(guessed, replace(signals, ends=ends_of))


def test_turns_of_one_token_are_tokens() -> None:
    for same in (assigns("ppo-turn"), assigns("steppo"), assigns("turn-ppo"), assigns("bi-level-gae", turn_gamma=0.9)):
        holds(turns_of_one_token_are_tokens, same, ONE_TOKEN_TURNS, SEEDS, count=8)


def test_turns_guessed_from_rewards_are_seen() -> None:
    rejected(turns_of_one_token_are_tokens, turns_by_reward, ONE_TOKEN_TURNS, SEEDS)


def interleaved_chains_are_chains(gae: Gae, chains: Chains, gamma: float, lam: float, seed: int) -> None:
    """A tree of one child each is a chain, wherever its elements stand: only the element before each matters."""
    order = torch.argsort(torch.rand(len(chains.unit), generator=torch.Generator().manual_seed(seed)))
    order = order[
        torch.argsort(_depths(chains.before)[order], stable=True)
    ]  # an element stands after the one before it
    place = torch.argsort(order)
    before = torch.where(chains.before >= 0, place[chains.before.clamp(min=0)], -1)[order]
    found = gae(chains.rewards[order], chains.values[order], chains.other[order], before, gamma, lam)
    expected = torch.zeros_like(chains.rewards)
    for j in reversed(range(len(expected))):
        following, carried = (chains.other[j], 0.0) if chains.last[j] else (chains.values[j + 1], expected[j + 1])
        expected[j] = chains.rewards[j] + gamma * following - chains.values[j] + gamma * lam * carried
    assert close(found, expected[order])


def _depths(before: Tensor) -> Tensor:
    depths = torch.zeros_like(before)
    for element, earlier in enumerate(before.tolist()):
        depths[element] = 0 if earlier < 0 else depths[earlier] + 1
    return depths


def neighbours(rewards: Tensor, values: Tensor, after: Tensor, before: Tensor, gamma: float, lam: float) -> Tensor:
    """Wrong: what stands next in memory is taken for what comes next in time."""
    root = before < 0
    return generalized_advantages(rewards, values, after, previous_within(root.cumsum(0) - 1), gamma, lam)


def test_a_tree_of_one_child_each_is_a_chain() -> None:
    holds(interleaved_chains_are_chains, generalized_advantages, CHAINS, DISCOUNT, DISCOUNT, SEEDS)
    rejected(interleaved_chains_are_chains, neighbours, CHAINS, DISCOUNT, DISCOUNT, SEEDS)
