"""P9: corrections for the disagreement of sampler and trainer, and what two policies do that three do as well."""

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
from agent_r1.algorithms.component import Level
from agent_r1.algorithms.loss_terms import Correction, Rejection
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.signals import ModelOutputs, TokenOutputs
from agent_r1.algorithms.validation import check
from agent_r1.core.errors import InvalidInput
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import pack_prefix_tree

Trust = Callable[[TrainingBatch, Tensor], Tensor]
"""(batch, log-probabilities (N,) under the trainer's policy before the update) -> the factor of each token's loss."""

SEEDS = st.integers(0, 99)
LEVELS: tuple[Level, ...] = ("token", "turn", "trajectory")


def of(part: Correction | Rejection) -> Trust:
    """What a row with this part trusts."""
    name = "correction" if isinstance(part, Correction) else "rejection"
    row = ALGORITHMS["grpo"].model_copy(update={name: part})
    return lambda batch, old: row.credit(batch, ModelOutputs(old=old)).trust


CORRECTIONS = [part for level in LEVELS for part in (Correction(level=level), Correction(rule="window", level=level))]
REJECTIONS = [
    part for level in LEVELS for part in (Rejection(level=level), Rejection(statistic="product", level=level))
]
EVERY: list[Correction | Rejection] = [*CORRECTIONS, *REJECTIONS]


def name(part: Correction | Rejection) -> str:
    return f"{part.rule if isinstance(part, Correction) else part.statistic}-{part.level}"


def batch_of(episodes: Episodes) -> TrainingBatch:
    return assemble(samples(episodes), pack_prefix_tree)


def moved(batch: TrainingBatch, seed: int, spread: float = 1.0) -> Tensor:
    """What the trainer says of tokens whose sampler said otherwise."""
    noise = torch.randn(len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return batch.sampler_logprobs + spread * noise


def agreement_is_trusted(trust: Trust, episodes: Episodes) -> None:
    batch = batch_of(episodes)
    assert torch.equal(trust(batch, batch.sampler_logprobs), torch.ones(len(batch.ids)).double())


def of_log_ratios(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong: bounds of a ratio, compared with its logarithm."""
    ratios = old - batch.sampler_logprobs
    return ((ratios >= 0.5) & (ratios <= 2.0)).double()


@pytest.mark.parametrize("part", EVERY, ids=name)
def test_where_sampler_and_trainer_agree_nothing_is_changed(part: Correction | Rejection) -> None:
    holds(agreement_is_trusted, of(part), EPISODES, count=5)


def test_rejecting_what_agrees_is_seen() -> None:
    rejected(agreement_is_trusted, of_log_ratios, EPISODES)


def nothing_counts_more_than_the_bound(trust: Trust, episodes: Episodes, seed: int) -> None:
    batch = batch_of(episodes)
    found = trust(batch, moved(batch, seed))
    assert bool((found >= 0).all()) and bool((found <= 2.0).all())


def bounded_logarithm(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong: the logarithm is bounded in place of the ratio."""
    return (old - batch.sampler_logprobs).clamp(max=2.0).exp()


def normalised(batch: TrainingBatch, old: Tensor) -> Tensor:
    """Wrong here: divided by the mean, after which no bound holds."""
    weight = (old - batch.sampler_logprobs).exp().clamp(max=2.0)
    return weight / weight.mean()


@pytest.mark.parametrize("part", EVERY, ids=name)
def test_what_is_trusted_is_bounded(part: Correction | Rejection) -> None:
    holds(nothing_counts_more_than_the_bound, of(part), EPISODES, SEEDS, count=5)


@pytest.mark.parametrize("wrong", [bounded_logarithm, normalised])
def test_what_is_not_bounded_is_seen(wrong: Trust) -> None:
    rejected(nothing_counts_more_than_the_bound, wrong, EPISODES, SEEDS)


def a_trajectory_is_trusted_as_a_whole(trust: Trust, episodes: Episodes, seed: int) -> None:
    batch = batch_of(episodes)
    found = trust(batch, moved(batch, seed, 0.05))
    for trajectory in range(len(batch.attempts)):
        assert len(found[batch.token_trajectory == trajectory].unique()) == 1


@pytest.mark.parametrize("part", [part for part in EVERY if part.level == "trajectory"], ids=name)
def test_rules_for_trajectories_tear_none_apart(part: Correction | Rejection) -> None:
    holds(a_trajectory_is_trusted_as_a_whole, of(part), EPISODES, SEEDS, count=8)


@pytest.mark.parametrize("part", [Correction(), Rejection(level="token"), Rejection(level="turn")], ids=name)
def test_rules_for_less_than_a_trajectory_are_seen(part: Correction | Rejection) -> None:
    rejected(a_trajectory_is_trusted_as_a_whole, of(part), EPISODES, SEEDS)


# two policies or three


@dataclass(frozen=True, slots=True)
class Decoupled:
    """A row that compares with the policy before the update, and corrects for the sampler."""

    row: Algorithm

    def gradient(self, batch: TrainingBatch, old: Tensor, now: Tensor) -> Tensor:
        anchor = batch.sampler_logprobs if self.row.anchor == "sampler" else old
        logprobs = now.clone().requires_grad_()
        view = TokenOutputs(logprobs, torch.zeros_like(now), anchor, batch.token_turn, batch.token_trajectory)
        loss, _ = self.row.loss(view, self.row.credit(batch, ModelOutputs(old=old)))
        return torch.autograd.grad(loss, logprobs)[0]


FREE = Clip(low=0.99, high=100.0, dual=None)
BYPASS = ALGORITHMS["dr-grpo"].model_copy(update={"surrogate": FREE, "anchor": "sampler"})
THREE = BYPASS.model_copy(update={"anchor": "policy", "correction": Correction(high=100.0)})


def three_policies_do_what_two_do(decoupled: Decoupled, episodes: Episodes, seed: int) -> None:
    """Inside all bounds (pi_old / mu) (pi / pi_old) is pi / mu."""
    batch = batch_of(episodes)
    old, now = moved(batch, seed, 0.3), moved(batch, seed + 1, 0.3)
    assert close(decoupled.gradient(batch, old, now), Decoupled(BYPASS).gradient(batch, old, now))


def test_inside_the_bounds_three_policies_do_what_two_do() -> None:
    holds(three_policies_do_what_two_do, Decoupled(THREE), EPISODES, SEEDS, count=20)


def test_correcting_a_ratio_that_compares_with_the_sampler_is_seen_and_refused() -> None:
    twice = THREE.model_copy(update={"anchor": "sampler"})
    rejected(three_policies_do_what_two_do, Decoupled(twice), EPISODES, SEEDS)
    with pytest.raises(InvalidInput, match="drop the correction"):
        check(twice)
