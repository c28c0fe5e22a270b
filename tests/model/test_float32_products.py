"""Layers with weights in bfloat16 that compute in float32, without a copy of all their weights."""

import pytest
import torch
from llama_models import make
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent_r1.model import float32_products, weights
from agent_r1.model.adapter import add_adapter, trained_weights
from agent_r1.model.config import LoraConfig
from agent_r1.model.float32_products import Float32Head, WideLinear
from agent_r1.model.value_head import build_value_model


def head_of(vocabulary: int, width: int, bias: bool = False) -> Float32Head:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=bias, dtype=torch.bfloat16)
    head.__class__ = Float32Head
    return head  # type: ignore[return-value]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (0, 16)])
def test_logits_and_gradients_are_those_of_a_float32_layer(
    bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_products, "PART_WEIGHTS", 16 * 7)  # 50 tokens: seven parts and a rest
    head = head_of(50, 16, bias)
    plain = nn.Linear(16, 50, bias=bias).double()
    with torch.no_grad():
        for own, other in zip(head.parameters(), plain.parameters(), strict=True):
            other.copy_(own)
    states = torch.randn(shape).bfloat16().requires_grad_()
    exact = states.detach().double().requires_grad_()
    factor = torch.randn(*shape[:-1], 50)
    logits, right = head(states), plain(exact)
    assert logits.dtype == torch.float32 and logits.shape == (*shape[:-1], 50)
    assert torch.allclose(logits.double(), right, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(head(states), logits)
    (logits * factor).sum().backward()
    (right * factor).sum().backward()
    pairs = [
        (states.grad, exact.grad),
        *((a.grad, b.grad) for a, b in zip(head.parameters(), plain.parameters(), strict=True)),
    ]
    for found, expected in pairs:
        assert found is not None and expected is not None
        assert torch.allclose(found.double(), expected, rtol=2**-7, atol=1e-4)  # the gradient is rounded once


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        sizes = [one.untyped_storage().nbytes() for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_no_pass_copies_all_weights_to_float32(frozen: bool) -> None:
    head = head_of(40_000, 64)
    head.requires_grad_(not frozen)
    states = torch.randn(2, 64).bfloat16().requires_grad_()
    with LargestTensor() as tensors:
        head(states).sum().backward()
    assert tensors.largest == head.weight.nbytes  # the weights or their gradient in bfloat16, never in float32
    assert (head.weight.grad is None) == frozen


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_a_layer_are_those_of_float32_rounded_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_products, "PART_WEIGHTS", 16 * 7)
    torch.manual_seed(0)
    layer = nn.Linear(16, 50, bias=bias, dtype=torch.bfloat16)
    layer.__class__ = WideLinear
    plain = nn.Linear(16, 50, bias=bias)
    plain.load_state_dict(layer.state_dict())
    states = torch.randn(2, 5, 16).bfloat16().requires_grad_()
    exact = states.detach().float().requires_grad_()
    factor = torch.randn(2, 5, 50).bfloat16()
    outputs, right = layer(states), plain(exact)
    assert outputs.dtype == torch.bfloat16
    assert torch.allclose(outputs.float(), right, rtol=2**-7, atol=1e-6)
    (outputs * factor).float().sum().backward()
    (right * factor.float()).sum().backward()
    for found, expected in zip(
        (states.grad, *(p.grad for p in layer.parameters())),
        (exact.grad, *(p.grad for p in plain.parameters())),
        strict=True,
    ):
        assert found is not None and found.dtype == torch.bfloat16 and expected is not None
        assert torch.allclose(found.float(), expected, rtol=2**-7, atol=1e-2)
    assert torch.equal(layer(exact.detach().bfloat16()), outputs)


def test_layers_are_wide_only_on_processors_without_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, expected in ((True, nn.Linear), (False, WideLinear)):
        monkeypatch.setattr(weights, "has_bfloat16_products", lambda supported=supported: supported)
        model = weights.cast_parameters(make("llama"), "bfloat16")
        assert {type(each) for each in model.modules() if isinstance(each, nn.Linear)} == {expected, Float32Head}
        critic = weights.mixed_precision(build_value_model(make("llama")), "bfloat16", keep=("head",)).compute
        assert {type(each) for each in critic.modules() if isinstance(each, nn.Linear)} == {expected, nn.Linear}
        assert type(critic.head) is nn.Linear


def test_an_adapter_has_the_outputs_and_gradients_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "has_bfloat16_products", lambda: False)
    half = add_adapter(make("llama"), LoraConfig(rank=3), seed=0, base="base")
    with torch.no_grad():
        for weight in trained_weights(half).values():
            weight.add_(0.1 * torch.randn_like(weight))
    weights.cast_parameters(half, "bfloat16")
    wide = add_adapter(make("llama"), LoraConfig(rank=3), seed=0, base="base")
    wide.load_state_dict(half.state_dict())
    found, expected = [], []
    for model, gradients in ((half, found), (wide, expected)):
        logits = model(torch.arange(20)[None]).logits
        logits.float().log_softmax(-1)[0, :, 3].sum().backward()
        gradients += [p.grad.float() for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected) == 2 * 7 * 2
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 0.1 * float(other.norm())
