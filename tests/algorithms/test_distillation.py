"""The divergence from a teacher over its most likely tokens, by hand and against the whole distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning import UpdateResult, UpdateSetup, backward
from tensors import close, numbers
from torch import Tensor
from updating import make_updater, update

from agent_r1.algorithms.loss_terms import Distillation
from agent_r1.algorithms.registry import build_algorithm
from agent_r1.algorithms.types import TokenOutputs
from agent_r1.data.batch import TrainingSample, select_trainable
from agent_r1.data.sequences import Packing, pack_causal, pack_prefix_tree

LOG2 = math.log(2)
EQUAL = (0.25, 0.25)


def divergence(settings: Distillation, policy: tuple[float, ...], teacher: tuple[float, ...]) -> tuple[float, Tensor]:
    """Return D of one token and its gradient in log pi of the top tokens, from the probabilities of these tokens."""
    logprobs = numbers(*policy).log()[None].requires_grad_()
    zero = torch.zeros(1, dtype=torch.float64)
    top = TokenOutputs(zero, zero, zero, top_logprobs=logprobs, teacher_top_logprobs=numbers(*teacher).log()[None])
    found = settings.divergence(top)
    found.sum().backward()
    assert logprobs.grad is not None
    return float(found.detach()), logprobs.grad[0]


def test_the_tokens_outside_the_top_count_as_one_token() -> None:
    value, gradient = divergence(Distillation(), EQUAL, (0.5, 0.25))
    assert value == pytest.approx(0.5 * LOG2 + 0.25 * math.log(0.25 / 0.5))
    # -p + p_rest pi / pi_rest
    assert close(gradient, numbers(-0.5 + 0.25 * 0.25 / 0.5, -0.25 + 0.25 * 0.25 / 0.5))
    value, _ = divergence(Distillation(), (0.25,), (0.5,))
    assert value == pytest.approx(0.5 * LOG2 + 0.5 * math.log(0.5 / 0.75))


def test_an_ignored_tail_leaves_the_sum_over_the_top_which_is_at_least_zero() -> None:
    value, gradient = divergence(Distillation(tail="ignored"), EQUAL, (0.5, 0.25))
    assert value == pytest.approx(0.5 * LOG2) and close(gradient, numbers(-0.5, -0.25))
    value, gradient = divergence(Distillation(tail="ignored"), (0.6, 0.3), (0.5, 0.25))
    assert value == 0 and close(gradient, numbers(0, 0))
    value, gradient = divergence(Distillation(), (0.6, 0.3), (0.5, 0.25))  # control: the bucket has the divergence
    assert (
        value == pytest.approx(0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)) and gradient.abs().max() > 0
    )


def test_a_token_above_the_bound_has_no_gradient() -> None:
    value, gradient = divergence(Distillation(bound=0.1), EQUAL, (0.5, 0.25))
    assert value == pytest.approx(0.1) and close(gradient, numbers(0, 0))
    assert divergence(Distillation(bound=1.0), EQUAL, (0.5, 0.25))[0] == pytest.approx(0.25 * LOG2)  # control


def test_a_token_that_the_teacher_excludes_adds_nothing() -> None:
    for settings in (Distillation(), Distillation(tail="ignored")):
        value, gradient = divergence(settings, (0.25, 0.25), (1.0, 0.0))
        assert value == pytest.approx(2 * LOG2) and gradient.isfinite().all() and float(gradient[1]) == 0


def test_a_policy_without_mass_outside_the_top_has_a_finite_divergence() -> None:
    value, gradient = divergence(Distillation(), (0.5, 0.5), (0.5, 0.25))
    assert math.isfinite(value) and value > 1 and gradient.isfinite().all()


SETUP = UpdateSetup(build_algorithm("top-k-distillation", {}), layers=1)


@pytest.fixture
def samples(make: Any) -> tuple[TrainingSample, ...]:
    branches = [make.turn(0, [1, 2], [3, 4]), make.turn(1, [5], [6], parent=0), make.turn(2, [7], [8, 9], parent=0)]
    others = [make.chain(([1], [token, 2]), ([3], [4])) for token in (5, 6)]
    attempts = [make.trajectory(turns, member=member) for member, turns in enumerate([branches, *others])]
    return select_trainable(make.groups(*attempts), {}).samples


def distilled(setup: UpdateSetup, samples: tuple[TrainingSample, ...], top_k: int) -> UpdateResult:
    """Return the loss and the gradient of the policy with ``top_k`` tokens."""
    prepared = setup.prepare(samples)
    outputs = replace(prepared.outputs, teacher_top=setup.models.top_tokens(prepared.batch, top_k))
    batch = prepared.batch
    return setup.result(
        prepared,
        lambda: backward(setup.models, setup.algorithm, replace(prepared, outputs=outputs), batch.sequences).loss,
    )


def forward_kl(samples: tuple[TrainingSample, ...]) -> Tensor:
    """Return the mean of KL(teacher || policy) over the sampled tokens, and accumulate its gradient."""
    divergences = []
    for trajectory, turn in ((one.trajectory, turn) for one in samples for turn in one.trajectory.turns):
        prompt = trajectory.prompt_ids(turn)
        ids = torch.tensor([[*prompt, *turn.action_ids]])
        teacher, policy = (
            (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
            for model in (SETUP.models.teacher, SETUP.models.policy)
        )
        divergences.append((teacher.exp() * (teacher - policy)).sum(-1))
    loss = torch.cat(divergences).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(("packing", "micro_tokens"), [(pack_prefix_tree, 1000), (pack_causal, 8)])
def test_with_the_whole_vocabulary_it_is_the_forward_kl_divergence(
    packing: Packing, micro_tokens: int, samples: tuple[TrainingSample, ...]
) -> None:
    found = distilled(replace(SETUP, packing=packing, micro_tokens=micro_tokens), samples, top_k=100)
    expected = SETUP.result(SETUP.prepare(samples), lambda: forward_kl(samples))
    assert close(found.loss, expected.loss) and close(found.gradient, expected.gradient)
    assert expected.gradient.abs().max() > 1e-3


def test_fewer_tokens_give_a_smaller_divergence_in_each_step(samples: tuple[TrainingSample, ...]) -> None:
    # to count several tokens as one loses information
    losses = [float(distilled(SETUP, samples, top_k).loss) for top_k in (1, 4, 8, 16)]
    assert 0 < losses[0] < losses[1] < losses[2] < losses[3]


def test_a_teacher_can_embed_more_tokens_than_the_policy(make: Any) -> None:
    teacher = make.model(seed=1)
    teacher.resize_token_embeddings(40)
    updater = make_updater(make.model(), "top-k-distillation", teacher=teacher)
    metrics = update(updater, make.random_groups(0)).metrics
    assert 0 < metrics["teacher_top_mass"] < 1 and metrics["distillation_loss"] > 0


def test_the_metrics_name_the_loss_and_the_mass_of_the_teachers_top_tokens(make: Any) -> None:
    metrics = [
        update(make_updater(make.model(), algorithm, teacher=make.model(seed=1)), make.random_groups(0)).metrics
        for algorithm in (build_algorithm("top-k-distillation", {"distillation.top_k": k}) for k in (1, 16))
    ]
    assert 0 < metrics[0]["teacher_top_mass"] < 1 - 1e-3 and metrics[1]["teacher_top_mass"] == pytest.approx(1)
    assert 0 < metrics[0]["distillation_loss"] < metrics[1]["distillation_loss"]
