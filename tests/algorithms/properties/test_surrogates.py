"""P8: policy losses are the policy gradient where nothing has moved, and each other where they should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from learning import close
from searching import holds, rejected
from torch import Tensor

from agent_r1.algorithms.component import Level
from agent_r1.algorithms.ops.loss_weights import unit_mean
from agent_r1.algorithms.ops.ratio import log_ratio, unit_log_ratio
from agent_r1.algorithms.policy_losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    ImportanceSampling,
    Moved,
    PolicyGradient,
    Sapo,
    PolicyLoss,
    Topr,
)
from agent_r1.data.segments import segment_count, segment_mean, segment_sum


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens of units of these lengths, how far the policy has moved at each, and its advantage."""

    unit: Tensor
    old: Tensor
    moved: Tensor
    advantage: Tensor

    @property
    def alike(self) -> Tokens:
        """With one advantage per unit."""
        return replace(self, advantage=segment_mean(self.advantage, self.unit)[self.unit])

    @property
    def unmoved(self) -> Tokens:
        return replace(self, moved=torch.zeros_like(self.moved))

    @property
    def single(self) -> Tokens:
        """In units of one token."""
        return replace(self, unit=torch.arange(len(self.unit)))


def _tokens(lengths: list[int], seed: int, spread: float) -> Tokens:
    unit = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    draw = torch.randn(3, len(unit), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Tokens(unit, -draw[0].abs() - 0.1, spread * draw[1], draw[2])


LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
TOKENS = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.sampled_from([0.05, 0.5]))
NEAR = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.just(0.05))

Loss = Callable[[Moved, Tensor], Tensor]
"""(how far the policy has moved, advantage (n,)) -> the loss of each token (n,)."""


def pulled(loss: Loss, tokens: Tokens, level: Level) -> tuple[Tensor, Tensor]:
    """The mean over units of the mean over tokens of the loss, and its gradient by each log-probability."""
    logprobs = (tokens.old + tokens.moved).requires_grad_()
    single = tokens.single.unit
    unit = single if level == "token" else tokens.unit
    ratios = log_ratio(logprobs, tokens.old) if level == "token" else unit_log_ratio(logprobs, tokens.old, unit)
    total = (unit_mean(tokens.unit) * loss(Moved(logprobs, tokens.old, ratios, unit), tokens.advantage)).sum()
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


# on-policy

SURROGATES: tuple[PolicyLoss, ...] = (
    Clip(),
    Clip(low=3e-4, high=4e-4, dual=None),
    PolicyGradient(),
    ImportanceSampling(),
    ImportanceSampling(bound=2.0),
    Cispo(),
    Topr(),
    Sapo(),
    Dppo(),
    Gmpo(),
)
CASES = [(surrogate, level) for surrogate in SURROGATES for level in sorted(surrogate.levels)]


def on_policy_it_is_the_policy_gradient(loss: Loss, tokens: Tokens, level: Level) -> None:
    _, gradient = pulled(loss, tokens.unmoved, level)
    assert close(gradient, -tokens.advantage * unit_mean(tokens.unit))


@pytest.mark.parametrize(("surrogate", "level"), CASES, ids=[f"{one.kind}-{level}" for one, level in CASES])
def test_on_policy_every_surrogate_is_the_policy_gradient(surrogate: PolicyLoss, level: Level) -> None:
    holds(on_policy_it_is_the_policy_gradient, surrogate.loss, TOKENS, st.just(level), count=6)


def gate_without_its_scale(moved: Moved, advantage: Tensor) -> Tensor:
    """Wrong: SAPO's sigmoid without 4 / tau."""
    return -advantage * torch.sigmoid(1.05 * (moved.ratios - 1))


def mean_over_the_padded_width(moved: Moved, advantage: Tensor) -> Tensor:
    """Wrong: GMPO's mean is taken over the width of the micro-batch, not over the unit's tokens."""
    tokens = moved.logprobs - moved.old
    mean = segment_sum(tokens, moved.unit) / segment_count(moved.unit).max()
    return -advantage * mean[moved.unit].exp()


@pytest.mark.parametrize("wrong", [gate_without_its_scale, mean_over_the_padded_width])
def test_another_gradient_on_policy_is_seen(wrong: Loss) -> None:
    rejected(on_policy_it_is_the_policy_gradient, wrong, TOKENS, st.just("trajectory"))


# levels of the ratio

Pulled = Callable[[Tokens], tuple[Tensor, Tensor]]
WIDE = Clip(low=0.2, high=0.28)


def with_units_of_one_token_it_is_ppo(sequence: Pulled, tokens: Tokens) -> None:
    loss, gradient = sequence(tokens.single)
    expected = pulled(WIDE.loss, tokens.single, "token")
    assert close(loss, expected[0]) and close(gradient, expected[1])


def it_has_the_gradient_of_the_sequences_ratio(sequence: Pulled, tokens: Tokens) -> None:
    """With one advantage per unit GSPO-token's gradient is GSPO's (2507.18071, section 4.3)."""
    logprobs = (tokens.old + tokens.moved).requires_grad_()
    ratios = segment_mean(logprobs - tokens.old, tokens.unit).exp()
    advantage = segment_mean(tokens.advantage, tokens.unit)
    bounded = torch.minimum(advantage * ratios, advantage * ratios.clamp(0.8, 1.28))
    dual = torch.where(advantage < 0, torch.maximum(bounded, 3 * advantage), bounded)
    loss, gradient = sequence(tokens.alike)
    assert close(loss, -dual.mean().detach())
    assert close(gradient, torch.autograd.grad(-dual.mean(), logprobs)[0])


def our_sequence(tokens: Tokens) -> tuple[Tensor, Tensor]:
    return pulled(WIDE.loss, tokens, "trajectory")


def tokens_own_ratio(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Wrong for a sequence: each token by its own ratio."""
    return pulled(WIDE.loss, tokens, "token")


def ratio_to_the_root_of_two_units(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Wrong: a length that is off by one, as where the end token is not counted."""
    off = replace(
        tokens, moved=tokens.moved * ((1 + segment_count(tokens.unit)) / segment_count(tokens.unit))[tokens.unit]
    )
    return pulled(WIDE.loss, off, "trajectory")


def test_ratios_of_units() -> None:
    holds(with_units_of_one_token_it_is_ppo, our_sequence, TOKENS)
    holds(it_has_the_gradient_of_the_sequences_ratio, our_sequence, TOKENS)
    rejected(with_units_of_one_token_it_is_ppo, ratio_to_the_root_of_two_units, TOKENS)
    rejected(it_has_the_gradient_of_the_sequences_ratio, tokens_own_ratio, TOKENS)


def where_nothing_clips_it_is_gspo(geometric: Loss, tokens: Tokens) -> None:
    free = Clip(low=0.999, high=1e6, dual=None)
    found, expected = pulled(geometric, tokens.alike, "trajectory"), pulled(free.loss, tokens.alike, "trajectory")
    assert close(found[0], expected[0]) and close(found[1], expected[1])


def test_gmpo_is_gspo_where_nothing_clips() -> None:
    holds(where_nothing_clips_it_is_gspo, Gmpo().loss, NEAR)
    rejected(where_nothing_clips_it_is_gspo, mean_over_the_padded_width, NEAR)


# clips

FAR = st.builds(_tokens, LENGTHS, st.integers(0, 999), st.sampled_from([0.3, 2.0]))


def the_dual_clip_acts_on_bad_tokens_that_ran_away_only(bounded: Loss, tokens: Tokens) -> None:
    """There the loss is -c A, without gradient; elsewhere it is what it was."""
    ran = (tokens.advantage < 0) & (tokens.moved.exp() > 3.0)
    with_bound, without = pulled(bounded, tokens.single, "token"), pulled(Clip(dual=None).loss, tokens.single, "token")
    share = unit_mean(tokens.single.unit)
    excess = torch.where(ran, -tokens.advantage * (tokens.moved.exp() - 3.0), 0.0)
    assert close(with_bound[0], without[0] - (share * excess).sum())
    assert close(with_bound[1], torch.where(ran, 0.0, without[1]))


def bounded_for_every_sign(moved: Moved, advantage: Tensor) -> Tensor:
    """Wrong: what tokens with A > 0 earn is bounded by the same number."""
    return torch.minimum(Clip(dual=None).loss(moved, advantage), -advantage * 3.0)


def test_the_dual_clip() -> None:
    holds(the_dual_clip_acts_on_bad_tokens_that_ran_away_only, Clip(dual=3.0).loss, FAR)
    rejected(the_dual_clip_acts_on_bad_tokens_that_ran_away_only, bounded_for_every_sign, FAR)


def it_pulls_unless_it_has_moved_outward_far_enough(loss: Loss, tokens: Tokens) -> None:
    """PPO: no gradient where A > 0 and r > 1 + high, or A < 0 and r < 1 - low; -A r everywhere else."""
    ratio, advantage = tokens.moved.exp(), tokens.advantage
    done = torch.where(advantage > 0, ratio > 1.28, ratio < 0.8)
    expected = torch.where(done, 0.0, -advantage * ratio) * unit_mean(tokens.single.unit)
    assert close(pulled(loss, tokens.single, "token")[1], expected)


def clipped_only(moved: Moved, advantage: Tensor) -> Tensor:
    """Wrong: the clip without the minimum: a token that moved the wrong way far enough never comes back."""
    return -advantage * moved.ratios.clamp(0.8, 1.28)


def test_ppo_pulls_nothing_in_exactly_its_region() -> None:
    holds(it_pulls_unless_it_has_moved_outward_far_enough, Clip(low=0.2, high=0.28, dual=None).loss, FAR)
    rejected(it_pulls_unless_it_has_moved_outward_far_enough, clipped_only, FAR)
