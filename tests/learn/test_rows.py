"""Each algorithm gives the credit and the loss of a case computed by hand, and its terms are checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.learn.batch import Batch, assemble
from agent_r1.learn.row import Signals, TokenView
from agent_r1.learn.rows import ROWS, build_row
from agent_r1.learn.samples import admit, sift
from agent_r1.learn.sequences import tree_sequences

NOTHING = Signals(values=None)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor | None, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return found is not None and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def batch(make: Any) -> Batch:
    """Two attempts at one task: one of two turns (2 tokens and 1) that earned 1, one of a token that earned 0."""
    first = make.trajectory(make.chain(([1], [2, 3]), ([4, 5, 6], [7])), {"score": 1.0})
    second = make.trajectory(make.chain(([1], [8])), {"score": 0.0}, member=1, truncated=True)
    return assemble(admit(make.groups(first, second), {}).samples, tree_sequences)


def test_grpo_by_hand(batch: Batch) -> None:
    credit = build_row("grpo", {}).credit(batch, NOTHING)
    high = 0.5 / math.sqrt(0.5)
    assert close(credit.advantage, numbers(high, high, high, -high), 1e-5)
    assert close(credit.weight, numbers(0.25, 0.25, 0.25, 0.25))
    assert credit.value_target is None


def test_rloo_by_hand(batch: Batch) -> None:
    credit = build_row("rloo", {"aggregation": "trajectory_mean"}).credit(batch, NOTHING)
    assert close(credit.advantage, numbers(1, 1, 1, -1))
    assert close(credit.weight, numbers(1 / 6, 1 / 6, 1 / 6, 1 / 2))


def test_reinforce_plus_plus_by_hand(batch: Batch) -> None:
    credit = build_row("reinforce++", {"gamma": 0.5}).credit(batch, NOTHING)
    to_go = numbers(0.25, 0.5, 1.0, 0.0)  # three tokens later, whatever the tool said in between
    assert close(credit.advantage, (to_go - to_go.mean()) / to_go.std())


def test_ppo_by_hand(batch: Batch) -> None:
    values = numbers(0.1, 0.2, 0.4, 0.3)
    credit = build_row("ppo", {"gamma": 0.5, "lam": 0.5}).credit(batch, Signals(values))
    third = 1 - 0.4
    second = 0.5 * 0.4 - 0.2 + 0.25 * third
    advantage = numbers(0.5 * 0.2 - 0.1 + 0.25 * second, second, third, -0.3)
    assert close(credit.value_target, advantage + values)
    assert close(credit.advantage, (advantage - advantage.mean()) / advantage.std())


def view(logprobs: Tensor, old: Tensor, values: Tensor | None = None, old_values: Tensor | None = None) -> TokenView:
    return TokenView(logprobs.requires_grad_(), old, values, old_values)


def test_the_clipped_loss_by_hand(batch: Batch) -> None:
    row = build_row("rloo", {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0})
    logprobs = numbers(1.5, 0.5, 1.0, 5.0).log()
    loss, metrics = row.loss(view(logprobs, torch.zeros_like(logprobs)), row.credit(batch, NOTHING))
    assert close(loss, numbers(-1.3, -0.5, -1.0, 3.0).mean())  # clipped, free, free, bounded by the dual clip
    assert close(metrics["clip_fraction"], numbers(0.5).squeeze())
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert close(gradient, numbers(0.0, -0.5 / 4, -1.0 / 4, 0.0))


def test_without_a_dual_clip_a_bad_token_pulls_as_far_as_its_ratio(batch: Batch) -> None:
    row = build_row("rloo", {"dual_clip": None})
    logprobs = numbers(1.0, 1.0, 1.0, 5.0).log()
    loss, _ = row.loss(view(logprobs, torch.zeros_like(logprobs)), row.credit(batch, NOTHING))
    assert close(loss, numbers(-1.0, -1.0, -1.0, 5.0).mean())


def test_ppos_loss_trains_the_critic_and_the_policy_apart(batch: Batch) -> None:
    row = build_row("ppo", {"value_clip": 0.5})
    old_values = numbers(0.0, 0.0, 0.0, 0.0)
    logprobs, values = numbers(0.0, 0.0, 0.0, 0.0), numbers(0.2, 0.0, 0.9, 0.1).requires_grad_()
    credit = row.credit(batch, Signals(old_values))
    loss, metrics = row.loss(view(logprobs, torch.zeros(4).double(), values, old_values), credit)
    expected = numbers(0.8**2, 1.0, 0.5**2, 0.1**2).mean() / 2  # 0.9 is clipped to 0.5
    assert close(metrics["value_loss"], expected)
    by_policy, by_critic = torch.autograd.grad(loss, (logprobs, values))
    assert close(by_policy, -credit.advantage / 4)
    assert close(by_critic, numbers(-0.8, -1.0, 0.0, 0.1) / 4)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_groups_without_variance_are_left_out_where_attempts_are_compared_within_groups(name: str, make: Any) -> None:
    def attempt(group: int, member: int, score: float) -> Any:
        return make.trajectory(make.chain(([1], [2])), {"score": score}, group=group, member=member)

    groups = make.groups(
        attempt(0, 0, 0.1 + 0.2), attempt(0, 1, 0.3), attempt(1, 0, 1.0), attempt(1, 1, 0.0), attempt(2, 0, 1.0)
    )
    sifted = sift(admit(groups, {}), build_row(name, {}).filters)
    assert {sample.group for sample in sifted.samples} == {1}
    assert {out.reason for out in sifted.left_out} == {"zero variance"} and len(sifted.left_out) == 3


@pytest.mark.parametrize("name", ["ppo", "reinforce++"])
def test_other_algorithms_learn_from_every_group(name: str) -> None:
    assert build_row(name, {}).filters == ()


def test_only_ppo_asks_for_a_critic() -> None:
    assert {name for name in ROWS if "critic" in build_row(name, {}).needs} == {"ppo"}


def test_a_row_says_its_objective_with_its_numbers() -> None:
    for name in ROWS:
        row = build_row(name, {"clip_high": 0.28, "epochs": 3})
        assert row.name == name and row.epochs == 3
        assert "clip(r, 0.8, 1.28)" in row.objective and "\n" not in row.objective


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("gpro", {}, "did you mean grpo? there are: grpo, ppo, reinforce++, rloo"),
        ("", {}, "there are: grpo, ppo, reinforce++, rloo"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean clip_high?"),
        ("grpo", {"gamma": 0.9}, "term of grpo"),
        ("ppo", {"gamma": 1.5}, "ppo.gamma: got 1.5"),
        ("ppo", {"gamma": "much"}, "ppo.gamma: got much"),
        ("ppo", {"aggregation": "mean"}, "ppo.aggregation: got mean"),
        ("grpo", {"clip_low": math.nan}, "grpo.clip_low: got nan"),
    ],
)
def test_what_is_not_known_or_not_possible_is_refused_in_one_line(name: str, overrides: dict, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build_row(name, overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value)
