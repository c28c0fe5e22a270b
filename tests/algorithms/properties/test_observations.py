"""P1: what the world says between actions changes no credit, no loss and no gradient of the actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import ALL, Learned, Learning, close, discounted
from ragged import EPISODES, SEVERAL, Episodes, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Masks, Rejection
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.signals import ModelOutputs
from agent_r1.data.assemble import Scope, assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.segments import segment_last
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import TrainingSample
from agent_r1.trainer.forward_backward import learn

Assign = Callable[[TrainingBatch, ModelOutputs], Tensor]
"""Advantages (N,) of all tokens of a batch; only those of action tokens are looked at."""

PPO = discounted(ALGORITHMS["ppo"])
UNMASKED = Masks(advantage=False, loss=False)
SEEDS = st.integers(0, 99)


def of_actions(row: Algorithm) -> Algorithm:
    """The row without its model of the world, which learns observations on purpose."""
    return row.model_copy(update={"observation": 0.0})


def changed(row: Algorithm, **changes: object) -> Algorithm:
    return row.model_copy(update=changes)


# credit, loss and gradient, the way from samples to gradients


def unmoved_by_observations(learning: Callable[[tuple[TrainingSample, ...]], Learned], episodes: Episodes) -> None:
    """The models look at the last token only: inserted ones leave log-probabilities and values as they were."""
    quiet, talkative = learning(samples(episodes)), learning(samples(episodes, talkative=True))
    for name in ("advantage", "share", "trust", "loss", "gradient"):
        assert close(getattr(quiet, name), getattr(talkative, name)), name


@pytest.mark.parametrize("scope", ["actions", "episodes"])
def test_observations_move_no_row(scope: Scope) -> None:
    def every_row(learning: type[Learning], episodes: Episodes) -> None:
        for row in ALL:
            unmoved_by_observations(learning(of_actions(row), scope=scope), episodes)

    holds(every_row, Learning, SEVERAL, count=3)


@pytest.mark.parametrize("scope", ["actions", "episodes"])
@pytest.mark.parametrize("name", ["gspo", "gmpo", "steppo"])
def test_observations_move_no_ratio_and_no_rejection_of_whole_turns_or_trajectories(name: str, scope: Scope) -> None:
    row = changed(ALGORITHMS[name], rejection=Rejection(level=ALGORITHMS[name].ratio, low=0.8, high=1.5))
    holds(unmoved_by_observations, Learning(row, scope=scope), EPISODES, count=15)


@pytest.mark.parametrize(
    "row", [PPO, discounted(ALGORITHMS["reinforce++"]), discounted(ALGORITHMS["vapo"])], ids=lambda row: row.name
)
def test_credit_over_observations_is_seen(row: Algorithm) -> None:
    rejected(unmoved_by_observations, Learning(changed(row, masks=Masks(advantage=False))), EPISODES)


def test_learning_observations_is_seen() -> None:
    rejected(unmoved_by_observations, Learning(changed(PPO, masks=UNMASKED)), EPISODES)
    rejected(unmoved_by_observations, Learning(ALGORITHMS["echo"]), EPISODES)


# credit alone, where peers go wrong


def skips_observations(assign: Assign, episodes: Episodes, seed: int) -> None:
    """Values at observations are anything: nothing may depend on them, nor on how many there are."""
    found = []
    for talkative in (False, True):
        batch = assemble(samples(episodes, talkative=talkative), pack_prefix_tree, "episodes")
        chosen = batch.chosen
        values = torch.randn(len(chosen), generator=torch.Generator().manual_seed(seed)).double()
        values[chosen] = torch.linspace(-1, 1, int(chosen.sum()), dtype=torch.float64)
        found.append(
            assign(batch, ModelOutputs(values=values, ends=torch.zeros(len(batch.turn_trajectory)).double()))[chosen]
        )
    assert close(found[0], found[1])


def dense_gae(gamma: float, lam: float, *, zeroed: bool = False) -> Assign:
    """GAE with every token as a step: SkyRL and slime; ``zeroed``: V is 0 at observations, OpenRLHF."""

    def assign(batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
        assert signals.values is not None
        values = signals.values * batch.chosen if zeroed else signals.values
        advantage = torch.zeros_like(values)
        for token in reversed(range(len(values))):
            ends = token + 1 == len(values) or batch.token_trajectory[token] != batch.token_trajectory[token + 1]
            following, carried = (0.0, 0.0) if ends else (values[token + 1], advantage[token + 1])
            error = batch.token_rewards[token] + gamma * following - values[token]
            advantage[token] = error + gamma * lam * carried
        return advantage

    return assign


def reset_returns(batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
    """REINFORCE++ whose running return starts anew after each observation: SkyRL."""
    returns = torch.zeros_like(batch.token_rewards)
    for token in reversed(range(len(returns))):
        ends = token + 1 == len(returns) or batch.token_trajectory[token] != batch.token_trajectory[token + 1]
        carried = 0.0 if ends or not batch.chosen[token + 1] else 0.9 * returns[token + 1]
        returns[token] = batch.token_rewards[token] + carried
    return returns


def returns_over_actions(batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
    """The same, right: a loop over action tokens."""
    returns, later = torch.zeros_like(batch.token_rewards), -1
    for token in reversed(batch.chosen.nonzero().squeeze(1).tolist()):
        together = later >= 0 and batch.token_trajectory[token] == batch.token_trajectory[later]
        returns[token] = batch.token_rewards[token] + (0.9 * returns[later] if together else 0.0)
        later = token
    return returns


@pytest.mark.parametrize("row", [of_actions(row) for row in ALL], ids=lambda row: row.name)
def test_our_credit_skips_observations(row: Algorithm) -> None:
    def credit(batch: TrainingBatch, signals: ModelOutputs) -> Tensor:
        log = torch.zeros(len(batch.ids)).double()
        return row.credit(batch, replace(signals, old=log - 1.0, reference=log - 2.0, teacher=log - 1.5)).advantage

    holds(skips_observations, credit, SEVERAL, SEEDS, count=3)


@pytest.mark.parametrize("zeroed", [False, True])
def test_gae_over_observations_is_seen_unless_gamma_and_lambda_are_one(zeroed: bool) -> None:
    rejected(skips_observations, dense_gae(1.0, 0.8, zeroed=zeroed), EPISODES, SEEDS, count=25)
    rejected(skips_observations, dense_gae(0.9, 1.0, zeroed=zeroed), EPISODES, SEEDS, count=25)
    holds(skips_observations, dense_gae(1.0, 1.0, zeroed=zeroed), EPISODES, SEEDS, count=10)


def equals_returns_over_actions(assign: Assign, episodes: Episodes) -> None:
    batch = assemble(samples(episodes), pack_prefix_tree, "episodes")
    assert close(assign(batch, ModelOutputs())[batch.chosen], returns_over_actions(batch, ModelOutputs())[batch.chosen])


def test_returns_that_start_anew_after_an_observation_are_seen() -> None:
    holds(equals_returns_over_actions, returns_over_actions, EPISODES, count=5)
    rejected(equals_returns_over_actions, reset_returns, EPISODES)


# where rewards stand


def nothing_earned_is_lost(assembled: Callable[[tuple[TrainingSample, ...]], TrainingBatch], episodes: Episodes) -> None:
    """A call's reward stands where the call ends (here: on a turn's first token), a turn's on its last action token,
    the outcome on the last of all."""
    given = samples(episodes)
    expected: list[float] = []
    for sample in given:
        for turn, reward, (call,) in zip(
            sample.trajectory.turns, sample.turn_rewards, sample.call_rewards, strict=True
        ):
            first = len(expected)
            expected += [0.0] * len(turn.action_ids)
            expected[first] += call
            expected[-1] += reward
        expected[-1] += sample.outcome
    assert close(assembled(given).actions().token_rewards, torch.tensor(expected, dtype=torch.float64))


def ours(given: tuple[TrainingSample, ...]) -> TrainingBatch:
    return assemble(given, pack_prefix_tree, "episodes")


def on_the_turns_last_token(given: tuple[TrainingSample, ...]) -> TrainingBatch:
    """A turn's reward on the last token of its response, which is the world's where the world answered."""
    batch = ours(given)
    place = segment_last(batch.token_turn)
    return replace(batch, token_rewards=torch.zeros_like(batch.token_rewards).index_put((place,), batch.turn_rewards))


def test_rewards_stand_on_action_tokens() -> None:
    holds(nothing_earned_is_lost, ours, EPISODES, count=15)
    rejected(nothing_earned_is_lost, on_the_turns_last_token, EPISODES)


# gradients at a real model's positions


def leaves_observations_alone(learning: Learning, episodes: Episodes) -> None:
    """States that predict no action token get a gradient of exactly 0; logits are a linear map of full rank of them."""
    prepared = learning.prepared(samples(episodes, talkative=True))
    norm = learning.models.policy.base_model.get_submodule("ln_f")
    found: list[Tensor] = []
    hook = norm.register_forward_hook(lambda _, __, states: states.register_hook(found.append) and None)
    try:
        for sequence in prepared.batch.sequences:
            learn(learning.models, learning.row, prepared, [sequence], 1.0)
            actions = sequence.predictors[prepared.batch.chosen[sequence.tokens]]
            elsewhere = torch.ones(len(sequence), dtype=torch.bool).index_fill(0, actions, False)
            assert found.pop()[0, elsewhere].count_nonzero() == 0
    finally:
        hook.remove()


def test_positions_that_predict_no_action_get_exactly_no_gradient() -> None:
    def any_row(learning: type[Learning], row: Algorithm, episodes: Episodes) -> None:
        leaves_observations_alone(learning(of_actions(row), layers=1, scope="episodes"), episodes)

    holds(any_row, Learning, st.sampled_from(ALL), EPISODES, count=40)


def test_a_gradient_at_observations_is_seen() -> None:
    rejected(leaves_observations_alone, Learning(changed(PPO, masks=UNMASKED), layers=1), EPISODES)
