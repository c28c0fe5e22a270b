"""P9: corrections of the mismatch between sampler and trainer, and their equality to a ratio over the sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from ragged import EPISODES, Episodes, samples
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Correction, Rejection
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import Level, ModelOutputs, TokenOutputs
from agent_r1.algorithms.validation import check_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.data.batch import TrainingBatch, assemble_batch
from agent_r1.data.sequences import pack_prefix_tree

ImportanceWeights = Callable[[TrainingBatch, Tensor], Tensor]
"""(batch, log-probabilities (N,) under the trainer's policy before the update) -> the factor on each token's loss."""

SEEDS = st.integers(0, 99)
LEVELS: tuple[Level, ...] = ("token", "turn", "trajectory")


def weights_with(term: Correction | Rejection) -> ImportanceWeights:
    """Return the importance weights of an algorithm with this term."""
    field = "correction" if isinstance(term, Correction) else "rejection"
    algorithm = ALGORITHMS["grpo"].model_copy(update={field: term})
    return lambda batch, old: algorithm.compute_token_weights(batch, ModelOutputs(old_logprobs=old)).importance_weight


CORRECTIONS = [term for level in LEVELS for term in (Correction(level=level), Correction(rule="window", level=level))]
REJECTIONS = [
    term for level in LEVELS for term in (Rejection(level=level), Rejection(statistic="product", level=level))
]
TERMS: list[Correction | Rejection] = [*CORRECTIONS, *REJECTIONS]


def term_id(term: Correction | Rejection) -> str:
    return f"{term.rule if isinstance(term, Correction) else term.statistic}-{term.level}"


def batch_of(episodes: Episodes) -> TrainingBatch:
    return assemble_batch(samples(episodes), pack_prefix_tree)


def perturbed_logprobs(batch: TrainingBatch, seed: int, spread: float = 1.0) -> Tensor:
    """Return log-probabilities (N,) of a policy that differs from the sampler's."""
    noise = torch.randn(len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return batch.sampler_logprobs + spread * noise


def is_one_for_equal_policies(importance_weights: ImportanceWeights, episodes: Episodes) -> None:
    batch = batch_of(episodes)
    assert torch.equal(importance_weights(batch, batch.sampler_logprobs), torch.ones(len(batch.ids)).double())


def window_on_the_logarithm(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong: the bounds of a ratio are compared with its logarithm."""
    log_ratio = old - batch.sampler_logprobs
    return ((log_ratio >= 0.5) & (log_ratio <= 2.0)).double()


@pytest.mark.parametrize("term", TERMS, ids=term_id)
def test_equal_policies_are_not_corrected_and_importance_weights_are_bounded(term: Correction | Rejection) -> None:
    holds(is_one_for_equal_policies, weights_with(term), EPISODES, count=5)
    holds(stays_within_the_bound, weights_with(term), EPISODES, SEEDS, count=5)
    if term.level == "trajectory":
        holds(is_equal_within_a_trajectory, weights_with(term), EPISODES, SEEDS, count=8)


def test_a_window_that_rejects_equal_policies_is_detected() -> None:
    rejected(is_one_for_equal_policies, window_on_the_logarithm, EPISODES)


def stays_within_the_bound(importance_weights: ImportanceWeights, episodes: Episodes, seed: int) -> None:
    batch = batch_of(episodes)
    found = importance_weights(batch, perturbed_logprobs(batch, seed))
    assert bool((found >= 0).all()) and bool((found <= 2.0).all())


def bounded_logarithm(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong: the logarithm is bounded instead of the ratio."""
    return (old - batch.sampler_logprobs).clamp(max=2.0).exp()


def normalized(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong here: after division by the mean no bound holds."""
    weight = (old - batch.sampler_logprobs).exp().clamp(max=2.0)
    return weight / weight.mean()


@pytest.mark.parametrize("wrong", [bounded_logarithm, normalized])
def test_weights_without_bound_are_detected(wrong: ImportanceWeights) -> None:
    rejected(stays_within_the_bound, wrong, EPISODES, SEEDS)


def is_equal_within_a_trajectory(importance_weights: ImportanceWeights, episodes: Episodes, seed: int) -> None:
    batch = batch_of(episodes)
    found = importance_weights(batch, perturbed_logprobs(batch, seed, 0.05))
    for trajectory in range(len(batch.attempts)):
        assert len(found[batch.token_trajectory == trajectory].unique()) == 1


@pytest.mark.parametrize("term", [Correction(), Rejection(level="turn")], ids=term_id)
def test_terms_of_a_finer_level_are_detected(term: Correction | Rejection) -> None:
    rejected(is_equal_within_a_trajectory, weights_with(term), EPISODES, SEEDS)


# two policies or three


@dataclass(frozen=True, slots=True)
class Update:
    """The gradient of an algorithm's loss with respect to the log-probabilities."""

    algorithm: Algorithm

    def gradient(self, batch: TrainingBatch, old: Tensor, now: Tensor) -> Tensor:
        denominator = batch.sampler_logprobs if self.algorithm.ratio_denominator == "sampler" else old
        logprobs = now.clone().requires_grad_()
        tokens = TokenOutputs(logprobs, torch.zeros_like(now), denominator, self.algorithm.ratio_unit(batch))
        weights = self.algorithm.compute_token_weights(batch, ModelOutputs(old_logprobs=old))
        return torch.autograd.grad(self.algorithm.compute_loss(tokens, weights)[0], logprobs)[0]


FREE = Clip(clip_low=0.99, clip_high=100.0, dual_clip=None)
TWO_POLICIES = ALGORITHMS["dr-grpo"].model_copy(update={"loss": FREE, "ratio_denominator": "sampler"})
THREE_POLICIES = TWO_POLICIES.model_copy(
    update={"ratio_denominator": "old_policy", "correction": Correction(high=100.0)}
)


def equals_the_ratio_over_the_sampler(update: Update, episodes: Episodes, seed: int) -> None:
    """Within all bounds (pi_old / mu) (pi / pi_old) is pi / mu."""
    batch = batch_of(episodes)
    old, now = perturbed_logprobs(batch, seed, 0.3), perturbed_logprobs(batch, seed + 1, 0.3)
    assert close(update.gradient(batch, old, now), Update(TWO_POLICIES).gradient(batch, old, now))


def test_within_the_bounds_a_correction_equals_a_ratio_over_the_sampler() -> None:
    holds(equals_the_ratio_over_the_sampler, Update(THREE_POLICIES), EPISODES, SEEDS, count=20)


def test_correcting_a_ratio_over_the_sampler_is_detected_and_refused() -> None:
    twice = THREE_POLICIES.model_copy(update={"ratio_denominator": "sampler"})
    rejected(equals_the_ratio_over_the_sampler, Update(twice), EPISODES, SEEDS)
    with pytest.raises(InvalidInput, match="drop the correction"):
        check_algorithm(twice)
