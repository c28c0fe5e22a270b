"""Computing shared prefixes once changes neither loss nor gradient, and how a batch is cut does not either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.trajectory import Group
from agent_r1.data import micro_batches as microbatches
from agent_r1.data.assemble import assemble
from agent_r1.data.sequences import Packing, pack_per_turn, pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.forward_backward import ModelSet, PreparedBatch, forward_backward

Result = tuple[Tensor, Mapping[str, Tensor]]


def loss_and_gradient(
    make: Any,
    groups: Sequence[Group],
    layout: Packing,
    *,
    name: str = "ppo",
    budget: int = 10_000,
    exact: bool = True,
) -> Result:
    """The loss of the whole batch and the gradient by every parameter of the policy and the critic."""
    row = ALGORITHMS[name]
    policy, reference, teacher = (make.exact_model(seed) if exact else make.model(seed) for seed in range(3))
    critic = build_value_model(policy) if "critic" in row.needs else None
    if critic is not None:
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    models = ModelSet(policy, 0.7, budget, critic, reference, teacher)
    batch = assemble(select_trainable(groups, {}).samples, layout, row.token_scope)
    signals = replace(models.signals(batch), kl_coefficient=0.5)
    # old log-probabilities that are not the policy's own, so that clipping has something to do
    old = models.logprobs(batch) + 0.3 * torch.randn(
        len(batch.ids), dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    seen = forward_backward(models, row, PreparedBatch(batch, row.compute_token_weights(batch, signals), signals, old), batch.sequences, 1.0)
    modules = {"policy": policy, **({} if critic is None else {"critic": critic})}
    gradients = {f"{key}.{name}": p.grad for key, module in modules.items() for name, p in module.named_parameters()}
    return seen.loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def same(one: Result, other: Result, tolerance: float) -> bool:
    scale = max(float(gradient.abs().max()) for gradient in one[1].values())
    return (
        one[1].keys() == other[1].keys()
        and torch.allclose(one[0], other[0], rtol=tolerance, atol=tolerance)
        and all(torch.allclose(one[1][name], other[1][name], rtol=0, atol=tolerance * scale) for name in one[1])
    )


@pytest.fixture
def trees(make: Any) -> list[Group]:
    """Attempts that append, branch at several depths, share an empty observation, or rewrite their context."""
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


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-9), (False, 1e-5)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_merged_and_unmerged_batches_give_equal_loss_and_gradient(
    name: str, exact: bool, tolerance: float, trees: list[Group], make: Any
) -> None:
    merged = loss_and_gradient(make, trees, pack_prefix_tree, name=name, exact=exact)
    unmerged = loss_and_gradient(make, trees, pack_per_turn, name=name, exact=exact, budget=20)
    assert same(merged, unmerged, tolerance)


@pytest.mark.parametrize("broken", ["exits", "depths"])
def test_merging_with_a_wrong_mask_or_wrong_positions_would_have_been_seen(
    broken: str, trees: list[Group], make: Any
) -> None:
    def wrong(*arguments: Any) -> Any:
        return [
            replace(one, subtree_end=torch.full_like(one.subtree_end, len(one)))
            if broken == "exits"
            else replace(one, position_ids=torch.arange(len(one)))
            for one in pack_prefix_tree(*arguments)
        ]

    merged = loss_and_gradient(make, trees, pack_prefix_tree)
    assert not same(merged, loss_and_gradient(make, trees, wrong), 1e-4)


def test_an_appending_episode_of_ten_turns_is_read_once(make: Any) -> None:
    episode = make.trajectory(make.chain(*(([1, turn], [2, 3, turn]) for turn in range(10))), {"score": 1.0})
    read: list[int] = []

    def counting(layout: Packing) -> int:
        batch = assemble(select_trainable(make.groups(episode), {}).samples, layout)
        model = make.model()
        model.base_model.embed_tokens.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].numel()))
        row = ALGORITHMS["reinforce"]
        prepared = PreparedBatch(batch, row.compute_token_weights(batch, ModelOutputs()), ModelOutputs(), None)
        forward_backward(ModelSet(model, 1.0, 10_000), row, prepared, batch.sequences, 1.0)
        total, _ = sum(read), read.clear()
        return total

    assert counting(pack_prefix_tree) == 50
    assert counting(pack_per_turn) >= 275  # control: what it costs to read every prefix again


@pytest.mark.parametrize("budget", [1, 37, 100])
@pytest.mark.parametrize("name", ["ppo", "steppo", "vapo", "gspo", "gmpo", "dr-grpo", "echo"])
def test_how_a_batch_is_cut_and_padded_changes_nothing(
    name: str, budget: int, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make.random_groups(0)
    whole = loss_and_gradient(make, groups, pack_prefix_tree, name=name)
    assert same(whole, loss_and_gradient(make, groups, pack_prefix_tree, name=name, budget=budget), 1e-9)
    monkeypatch.setattr(microbatches, "MAX_PADDING", 0.9)
    assert same(whole, loss_and_gradient(make, groups, pack_prefix_tree, name=name, budget=budget), 1e-9)


def test_minibatches_have_the_batchs_gradient_on_average(make: Any) -> None:
    model, row = make.exact_model(), ALGORITHMS["reinforce"]
    batch = assemble(select_trainable(make.random_groups(0), {}).samples, pack_prefix_tree)
    prepared = PreparedBatch(batch, row.compute_token_weights(batch, ModelOutputs()), ModelOutputs(), None)

    def gradient(chosen: set[int]) -> Tensor:
        model.zero_grad()
        sequences = [sequence for sequence in batch.sequences if sequence.trajectory in chosen]
        forward_backward(ModelSet(model, 1.0, 100), row, prepared, sequences, len(batch.attempts) / len(chosen))
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole = gradient(set(range(12)))
    parts = [gradient(set(range(first, 12, 3))) for first in range(3)]
    assert torch.allclose(sum(parts) / 3, whole, atol=1e-12)
    assert not torch.allclose(parts[0], whole, atol=1e-3)


def test_the_order_of_groups_and_members_changes_nothing(make: Any) -> None:
    groups = make.random_groups(0)
    shuffled = [replace(group, trajectories=group.trajectories[::-1]) for group in reversed(groups)]
    one, other = (loss_and_gradient(make, order, pack_prefix_tree) for order in (groups, shuffled))
    assert torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_denominators_of_each_micro_batch_alone_would_have_been_seen(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # control: the mean of micro-batch means depends on the cut
    given = passes._credit_at

    def local(credit: Any, micro: Any, weight: float, like: Tensor) -> Any:
        return replace(given(credit, micro, weight, like), loss_weight=torch.full_like(like, 1 / len(like)))

    groups = make.random_groups(0)
    whole = loss_and_gradient(make, groups, pack_prefix_tree)
    monkeypatch.setattr(passes, "_credit_at", local)
    assert not same(whole, loss_and_gradient(make, groups, pack_prefix_tree, budget=37), 1e-4)
