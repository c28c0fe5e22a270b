"""A trainer that computes in bfloat16 keeps weights, gradients and moments in float32, so no small step is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from updating import make_updater, update

from agent_r1.core.errors import InvalidInput
from agent_r1.model import float32_products
from agent_r1.model.weights import cast_parameters, checkpoint_activations, mixed_precision
from agent_r1.trainer.config import TrainerConfig
from agent_r1.trainer.optimizer import Optimizer

LEARNING_RATE = 1e-5
STEPS = 6


def changed_share(before: dict[str, Tensor], module: nn.Module) -> float:
    """Return the share of the weights that changed."""
    pairs = [(before[name], parameter.detach()) for name, parameter in module.named_parameters()]
    return sum(int((old != new).sum()) for old, new in pairs) / sum(old.numel() for old, _ in pairs)


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def share_after_updates(make: Any, dtype: str) -> float:
    model = make.model(spread=0.05)
    before = copies(model)
    updater = make_updater(model, learning_rate=LEARNING_RATE, dtype=dtype)
    for number in range(STEPS):
        update(updater, make.random_groups(number))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return changed_share(before, model)


def share_in_pure_bfloat16(make: Any) -> float:
    """Return the share of bfloat16 weights that AdamW changes in as many steps, with gradients of any size."""
    model = cast_parameters(make.model(spread=0.05), "bfloat16")
    before = copies(model)
    optimizer = Optimizer({"policy": model}, TrainerConfig(learning_rate=LEARNING_RATE))
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random).bfloat16()
        optimizer.step(torch.tensor(0.0), ["policy"])
    return changed_share(before, model)


def test_bfloat16_changes_as_many_weights_as_float32(make: Any) -> None:
    full, mixed = (share_after_updates(make, dtype) for dtype in ("float32", "bfloat16"))
    pure = share_in_pure_bfloat16(make)
    assert mixed == pytest.approx(full, abs=0.02) and full > 0.7
    assert pure < 0.6 * full  # control: a step is smaller than the rounding of most weights


def test_gradients_of_micro_batches_add_up_in_float32(make: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    mixed = mixed_precision(linear, "bfloat16")
    parts = torch.randn(300, 4, 8).bfloat16()
    exact = torch.zeros(8, 8)
    for part in parts:
        mixed.compute(part).square().sum().backward()
        own = nn.Linear(8, 8).bfloat16()
        own.load_state_dict(mixed.compute.state_dict())
        own(part).square().sum().backward()
        exact += own.weight.grad.float()
    assert linear.weight.grad.dtype == torch.float32 and torch.equal(linear.weight.grad, exact)
    assert mixed.compute.weight.grad is None  # freed, and nothing is rounded in between


@pytest.mark.parametrize("part_weights", [float32_products.PART_WEIGHTS, 100], ids=["one part", "several parts"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_model_in_bfloat16_has_logits_in_float32(
    part_weights: int, with_gradient: bool, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_products, "PART_WEIGHTS", part_weights)
    model = make.model(spread=1.0)
    ordinary = copy.deepcopy(model.lm_head).bfloat16()
    cast_parameters(model, "bfloat16")
    ids = torch.arange(6)[None]
    with torch.set_grad_enabled(with_gradient):
        hidden = model.model(input_ids=ids).last_hidden_state
        logits = model(input_ids=ids).logits
    exact = (hidden.double() @ model.lm_head.weight.double().T).detach()
    assert hidden.dtype == torch.bfloat16 and float(exact.abs().max()) > 4
    assert logits.dtype == torch.float32 and logits.requires_grad == with_gradient
    assert torch.allclose(logits.double(), exact, rtol=1e-5, atol=1e-4)
    assert float((ordinary(hidden).double() - exact).abs().max()) > 1e-2  # an ordinary head rounds its logits


def test_tied_and_named_parameters_keep_what_casting_must_not_change(make: Any) -> None:
    model = make.model()
    model.lm_head.weight = model.model.embed_tokens.weight
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast_parameters(model, "bfloat16", keep=("lm_head",))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_activation_checkpointing_computes_layers_twice_and_changes_no_bit(make: Any) -> None:
    passes, versions = {False: 0, True: 0}, set()

    def count_for(on: bool) -> Any:
        def count(*_: Any) -> None:
            passes[on] += 1

        return count

    for on in passes:
        model = make.model()
        updater = make_updater(model, "ppo", learning_rate=1e-2, activation_checkpointing=on)
        model.model.layers[0].self_attn.register_forward_hook(count_for(on))
        versions.add(update(updater, make.random_groups(0)).version)
        assert not model.model.training and not model.model.layers[0].mlp.training
    assert len(versions) == 1 and passes[True] == 2 * passes[False]


def test_activation_checkpointing_is_refused_for_a_model_without_such_layers() -> None:
    with pytest.raises(InvalidInput, match=r"trainer\.activation_checkpointing: got Linear"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)), "Linear")
