"""The output layer of models in bfloat16, which computes in float32 without a copy of all its weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent_r1.model import weights
from agent_r1.model.weights import Float32Head


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
    monkeypatch.setattr(weights, "PART_WEIGHTS", 16 * 7)  # 50 tokens: seven parts and a rest
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
