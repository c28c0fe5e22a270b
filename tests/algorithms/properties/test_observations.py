"""P1: observations between actions change no advantage, no loss and no gradient of the actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from learning import ALL, SOME, UpdateResult, UpdateSetup, backward, close, discounted
from ragged import EPISODES, SEVERAL_GROUPS, Episodes, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Masks, Rejection
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.data.batch import TokenScope, TrainingBatch, TrainingSample, assemble_batch, segment_last
from agent_r1.data.sequences import pack_prefix_tree

AdvantageFn = Callable[[TrainingBatch, ModelOutputs], Tensor]
"""Returns the advantages (N,) of all tokens of a batch; only those of action tokens are compared."""

PPO = discounted(ALGORITHMS["ppo"])
UNMASKED = Masks(advantage=False, loss=False)
SEEDS = st.integers(0, 99)


def without_world_model(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm without its loss on observations, which trains on them on purpose."""
    return algorithm.model_copy(update={"observation_nll_coef": 0.0})


def changed(algorithm: Algorithm, **changes: object) -> Algorithm:
    return algorithm.model_copy(update=changes)


# advantages, loss and gradient of a whole update


def is_invariant_to_observations(
    update: Callable[[tuple[TrainingSample, ...]], UpdateResult], episodes: Episodes
) -> None:
    """The models see the last token only, so inserted observations change no log-probability and no value."""
    short, long = update(samples(episodes)), update(samples(episodes, long_observations=True))
    for name in ("advantage", "loss_weight", "importance_weight", "loss", "gradient"):
        assert close(getattr(short, name), getattr(long, name)), name


@pytest.mark.parametrize("scope", ["actions", "all"])
def test_observations_do_not_matter(scope: TokenScope) -> None:
    def for_every_algorithm(setup: type[UpdateSetup], episodes: Episodes) -> None:
        for algorithm in SOME:
            is_invariant_to_observations(setup(without_world_model(algorithm), scope=scope), episodes)

    holds(for_every_algorithm, UpdateSetup, SEVERAL_GROUPS, count=2)


@pytest.mark.parametrize(("name", "scope"), [("gspo", "actions"), ("gmpo", "all"), ("steppo", "all")])
def test_observations_enter_no_ratio_and_no_rejection_of_units(name: str, scope: TokenScope) -> None:
    rejection = Rejection(level=ALGORITHMS[name].ratio_level, low=0.8, high=1.5)
    setup = UpdateSetup(changed(ALGORITHMS[name], rejection=rejection), scope=scope)
    holds(is_invariant_to_observations, setup, EPISODES, count=8)


def test_advantages_over_observations_and_training_on_them_are_detected() -> None:
    rejected(is_invariant_to_observations, UpdateSetup(changed(PPO, masks=Masks(advantage=False))), EPISODES)
    rejected(is_invariant_to_observations, UpdateSetup(ALGORITHMS["echo"]), EPISODES)


# advantages alone, with the errors of other frameworks


def skips_observations(advantage_of: AdvantageFn, episodes: Episodes, seed: int) -> None:
    """Values at observations are random: nothing may depend on them, nor on the number of observations."""
    found = []
    for long_observations in (False, True):
        batch = assemble_batch(samples(episodes, long_observations=long_observations), pack_prefix_tree, "all")
        mask = batch.action_mask
        values = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed)).double()
        values[mask] = torch.linspace(-1, 1, int(mask.sum()), dtype=torch.float64)
        after_action = torch.zeros(len(batch.turn_trajectory)).double()
        found.append(advantage_of(batch, ModelOutputs(values=StateValues(values, after_action), entropy=values))[mask])
    assert close(found[0], found[1])


def dense_gae(gamma: float, lam: float, *, zeroed: bool = False) -> AdvantageFn:
    """GAE with every token as a time step, as in SkyRL and slime; if ``zeroed``, V is 0 at observations: OpenRLHF."""

    def advantage_of(batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        assert outputs.values is not None
        values = outputs.values.before_token * (batch.action_mask if zeroed else 1.0)
        advantage = torch.zeros_like(values)
        for token in reversed(range(len(values))):
            last = token + 1 == len(values) or batch.token_trajectory[token] != batch.token_trajectory[token + 1]
            next_value, carried = (0.0, 0.0) if last else (values[token + 1], advantage[token + 1])
            error = batch.token_rewards[token] + gamma * next_value - values[token]
            advantage[token] = error + gamma * lam * carried
        return advantage

    return advantage_of


def test_our_advantages_skip_observations() -> None:
    for algorithm in map(without_world_model, ALL):

        def advantage_of(batch: TrainingBatch, outputs: ModelOutputs, algorithm: Algorithm = algorithm) -> Tensor:
            log = torch.zeros(len(batch.ids)).double()
            outputs = replace(outputs, old_logprobs=log - 1.0, reference_logprobs=log - 2.0, teacher_logprobs=log - 1.5)
            return algorithm.compute_token_weights(batch, outputs).advantage

        holds(skips_observations, advantage_of, SEVERAL_GROUPS, SEEDS, count=2)


@pytest.mark.parametrize("zeroed", [False, True])
def test_gae_over_observations_is_detected_unless_gamma_and_lambda_are_one(zeroed: bool) -> None:
    rejected(skips_observations, dense_gae(1.0, 0.8, zeroed=zeroed), EPISODES, SEEDS, count=25)
    rejected(skips_observations, dense_gae(0.9, 1.0, zeroed=zeroed), EPISODES, SEEDS, count=25)
    holds(skips_observations, dense_gae(1.0, 1.0, zeroed=zeroed), EPISODES, SEEDS, count=10)


# positions of rewards


def keeps_every_reward(
    assemble_batch: Callable[[tuple[TrainingSample, ...]], TrainingBatch], episodes: Episodes
) -> None:
    """A call's reward is on the token that ends the call (here a turn's first), a turn's on its last action token, the
    outcome on the last action token of all."""
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
        expected[-1] += sample.outcome_reward
    assert close(assemble_batch(given).actions().token_rewards, torch.tensor(expected, dtype=torch.float64))


def ours(given: tuple[TrainingSample, ...]) -> TrainingBatch:
    return assemble_batch(given, pack_prefix_tree, "all")


def on_the_turns_last_token(given: tuple[TrainingSample, ...]) -> TrainingBatch:
    """Wrong: a turn's reward on its last token, which is an observation's if the environment answered."""
    batch = ours(given)
    last = segment_last(batch.token_turn)
    return replace(batch, token_rewards=torch.zeros_like(batch.token_rewards).index_put((last,), batch.turn_rewards))


def test_rewards_are_on_action_tokens() -> None:
    holds(keeps_every_reward, ours, EPISODES, count=8)
    rejected(keeps_every_reward, on_the_turns_last_token, EPISODES)


# gradients at the positions of a real model


def gives_observations_no_gradient(setup: UpdateSetup, episodes: Episodes) -> None:
    """Hidden states that predict no action token get a gradient of exactly 0. The logits are a linear map of full rank
    of them, so the gradient of the logits is 0 too."""
    prepared = setup.prepare(samples(episodes, long_observations=True))
    norm = setup.models.policy.base_model.get_submodule("ln_f")
    found: list[Tensor] = []
    hook = norm.register_forward_hook(lambda _, __, states: states.register_hook(found.append) and None)
    try:
        for sequence in prepared.batch.sequences:
            backward(setup.models, setup.algorithm, prepared, [sequence])
            actions = sequence.logit_positions[prepared.batch.action_mask[sequence.tokens]]
            elsewhere = torch.ones(len(sequence), dtype=torch.bool).index_fill(0, actions, False)
            assert found.pop()[0, elsewhere].count_nonzero() == 0
    finally:
        hook.remove()


def test_positions_that_predict_no_action_get_exactly_no_gradient() -> None:
    def for_any_algorithm(setup: type[UpdateSetup], algorithm: Algorithm, episodes: Episodes) -> None:
        gives_observations_no_gradient(setup(without_world_model(algorithm), layers=1, scope="all"), episodes)

    holds(for_any_algorithm, UpdateSetup, st.sampled_from(ALL), EPISODES, count=25)


def test_a_gradient_at_observations_is_detected() -> None:
    setup = UpdateSetup(changed(PPO, masks=UNMASKED), layers=1)
    rejected(gives_observations_no_gradient, setup, EPISODES)
