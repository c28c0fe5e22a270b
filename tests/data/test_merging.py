"""Merging shared prefixes, micro-batches and minibatches change neither loss nor gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from learning import backward, model_outputs
from learning_fixtures import Make
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs, TokenOutputs, TokenWeights
from agent_r1.core.trajectory import Group
from agent_r1.data import sequences as micro_batches_module
from agent_r1.data.batch import assemble_batch
from agent_r1.data.sequences import Packing, PrefixSharing, pack_per_turn, pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer.forward_backward import ModelSet, forward_backward
from agent_r1.trainer.protocol import PreparedBatch

Result = tuple[Tensor, Mapping[str, Tensor]]


@lru_cache
def models_of(exact: bool) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Return a policy, a reference and a teacher. Tests share them, because no test changes their weights."""
    policy, reference, teacher = (Make().exact_model(seed) if exact else Make().model(seed) for seed in range(3))
    return policy, reference, teacher


def loss_and_gradient(
    make: Any,
    groups: Sequence[Group],
    packing: Packing,
    *,
    name: str = "ppo",
    micro_tokens: int = 10_000,
    exact: bool = True,
    sharing: PrefixSharing | None = None,
) -> Result:
    """Return the loss of the whole batch and its gradient by every parameter of the policy and the critic."""
    algorithm = ALGORITHMS[name]
    policy, reference, teacher = models_of(exact)
    policy.zero_grad()
    critic = build_value_model(policy) if "critic" in algorithm.needs else None
    if critic is not None:
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    models = ModelSet(policy, 0.7, micro_tokens, critic, reference, teacher, sharing)
    batch = assemble_batch(select_trainable(groups, {}).samples, packing, algorithm.token_scope)
    # the old log-probabilities differ from the policy's, so that clipping has an effect
    noise = torch.randn(len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    old = models.logprobs(batch) + 0.3 * noise
    outputs = model_outputs(models, batch, old)
    weights = algorithm.compute_token_weights(batch, outputs, kl_coef=0.5)
    stats = forward_backward(models, algorithm, PreparedBatch(batch, weights, outputs, old))
    modules = {"policy": policy, **({} if critic is None else {"critic": critic})}
    gradients = {f"{key}.{name}": p.grad for key, module in modules.items() for name, p in module.named_parameters()}
    return stats.loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def same(one: Result, other: Result, tolerance: float) -> bool:
    scale = max(float(gradient.abs().max()) for gradient in one[1].values())
    return (
        one[1].keys() == other[1].keys()
        and torch.allclose(one[0], other[0], rtol=tolerance, atol=tolerance)
        and all(torch.allclose(one[1][name], other[1][name], rtol=0, atol=tolerance * scale) for name in one[1])
    )


@pytest.fixture
def trees(make: Any) -> list[Group]:
    """Attempts that append, branch at several depths, have an empty observation, or rewrite their context."""
    branching = [
        make.turn(0, [1, 2, 3], [4, 5]),
        make.turn(1, [6, 7], [8], parent=0),
        make.turn(2, [6], [9, 10], parent=0),
        make.turn(3, [], [11, 12], parent=1),
        make.turn(4, [13], [14], parent=1),
        make.turn(5, [3, 2], [1], parent=2),
    ]
    rewriting = [make.turn(0, [1, 2], [3]), make.turn(1, [4, 5, 6], [7, 8]), make.turn(2, [9], [10], parent=1)]
    appending = make.chain(*(([turn, 2], [3, turn]) for turn in range(6)))
    return make.groups(
        *(
            make.trajectory(turns, {"score": score}, member=member)
            for member, (turns, score) in enumerate([(branching, 1.0), (rewriting, 0.0), (appending, 0.5)])
        ),
        greedy={0: make.trajectory(appending, {"score": 0.3}, member=3)},
    )


@pytest.mark.parametrize(
    ("name", "exact", "tolerance"),
    [
        *((name, True, 1e-9) for name in ALGORITHMS),
        *((name, False, 1e-5) for name in ("ppo", "grpo", "gspo", "echo", "top-k-distillation")),
    ],
)
def test_merged_and_unmerged_batches_give_equal_loss_and_gradient(
    name: str, exact: bool, tolerance: float, trees: list[Group], make: Any
) -> None:
    merged = loss_and_gradient(make, trees, pack_prefix_tree, name=name, exact=exact)
    unmerged = loss_and_gradient(make, trees, pack_per_turn, name=name, exact=exact, micro_tokens=20)
    assert same(merged, unmerged, tolerance)


@pytest.mark.parametrize("broken", ["subtree_end", "position_ids"])
def test_a_wrong_mask_and_wrong_positions_are_detected(broken: str, trees: list[Group], make: Any) -> None:
    def wrong(*arguments: Any) -> Any:
        return [
            replace(one, subtree_end=torch.full_like(one.subtree_end, len(one)))
            if broken == "subtree_end"
            else replace(one, position_ids=torch.arange(len(one)))
            for one in pack_prefix_tree(*arguments)
        ]

    merged = loss_and_gradient(make, trees, pack_prefix_tree)
    assert not same(merged, loss_and_gradient(make, trees, wrong), 1e-4)


def test_an_appending_episode_of_ten_turns_is_computed_once(make: Any) -> None:
    episode = make.trajectory(make.chain(*(([1, turn], [2, 3, turn]) for turn in range(10))), {"score": 1.0})
    lengths: list[int] = []

    def tokens_read(packing: Packing) -> int:
        batch = assemble_batch(select_trainable(make.groups(episode), {}).samples, packing)
        model = make.model()
        model.base_model.embed_tokens.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].numel()))
        algorithm = ALGORITHMS["reinforce"]
        weights = algorithm.compute_token_weights(batch, ModelOutputs())
        prepared = PreparedBatch(batch, weights, ModelOutputs(), None)
        forward_backward(ModelSet(model, 1.0, 10_000), algorithm, prepared)
        total, _ = sum(lengths), lengths.clear()
        return total

    assert tokens_read(pack_prefix_tree) == 50
    assert tokens_read(pack_per_turn) >= 275  # control: the cost if every prefix is computed again


@pytest.mark.parametrize("name", ["ppo", "steppo", "vapo", "gspo", "gmpo", "dr-grpo", "echo"])
def test_micro_batches_and_padding_do_not_matter(name: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make.random_groups(0)
    whole = loss_and_gradient(make, groups, pack_prefix_tree, name=name)
    for padding in (micro_batches_module.MAX_PADDING, 0.9):
        monkeypatch.setattr(micro_batches_module, "MAX_PADDING", padding)
        for micro_tokens in (1, 37, 100):
            found = loss_and_gradient(make, groups, pack_prefix_tree, name=name, micro_tokens=micro_tokens)
            assert same(whole, found, 1e-9), (padding, micro_tokens)


def test_minibatches_have_the_gradient_of_the_batch_on_average(make: Any) -> None:
    model, algorithm = make.exact_model(), ALGORITHMS["reinforce"]
    batch = assemble_batch(select_trainable(make.random_groups(0), {}).samples, pack_prefix_tree)
    weights = algorithm.compute_token_weights(batch, ModelOutputs())
    prepared = PreparedBatch(batch, weights, ModelOutputs(), None)

    def gradient(trajectories: set[int]) -> Tensor:
        model.zero_grad()
        sequences = [sequence for sequence in batch.sequences if sequence.trajectory in trajectories]
        scale = len(batch.attempts) / len(trajectories)
        backward(ModelSet(model, 1.0, 100), algorithm, prepared, sequences, scale)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = gradient(set(range(12)))
    parts = [gradient(set(range(first, 12, 3))) for first in range(3)]
    assert torch.allclose(sum(parts) / 3, whole, atol=1e-12)
    assert not torch.allclose(parts[0], whole, atol=1e-3)


def test_the_order_of_groups_and_attempts_does_not_matter(make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    one, other = (loss_and_gradient(make, order, pack_prefix_tree) for order in (groups, shuffled))
    assert torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_denominators_of_each_micro_batch_are_detected(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # control: the mean of micro-batch means depends on the division
    compute_loss = Algorithm.compute_loss

    def local(algorithm: Algorithm, tokens: TokenOutputs, weights: TokenWeights) -> Any:
        mean = torch.full_like(weights.loss_weight, 1 / len(weights.loss_weight))
        return compute_loss(algorithm, tokens, replace(weights, loss_weight=mean))

    groups = make.random_groups(0)
    whole = loss_and_gradient(make, groups, pack_prefix_tree)
    monkeypatch.setattr(Algorithm, "compute_loss", local)
    assert not same(whole, loss_and_gradient(make, groups, pack_prefix_tree, micro_tokens=37), 1e-4)
