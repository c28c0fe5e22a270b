"""Products by oneDNN equal those of PyTorch's linear layers up to rounding, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model import weights as onednn
from agent_r1.model.forward import PrefixStates, backbone_of, hidden_states, use_tree_attention
from agent_r1.model.weights import OneDnnLinear, is_onednn_faster, padded_length, use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_onednn_faster", lambda: True)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    is_onednn_faster.cache_clear()


def llama(vocabulary: int = 4096) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 5), (0,), ()])
def test_results_and_gradients_are_those_of_a_linear_layer(bias: bool, shape: tuple[int, ...]) -> None:
    plain = nn.Linear(24, 40, bias)
    fast = copy.deepcopy(plain)
    fast.__class__ = OneDnnLinear
    found = []
    for layer in (plain, fast):
        torch.manual_seed(1)
        states = torch.randn(*shape, 48)[..., ::2].requires_grad_()  # not contiguous
        result = layer(states)
        gradients = torch.autograd.grad((result * torch.randn(*shape, 40)).sum(), [states, *layer.parameters()])
        found.append((result.detach(), *gradients))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and (one - other).abs().sum() <= 1e-5 * one.abs().sum()


@pytest.mark.parametrize("tokens", [5, 8])
def test_a_model_can_change_results_in_place(tokens: int) -> None:
    plain, states = nn.Linear(24, 40), torch.randn(1, tokens, 24)
    fast = copy.deepcopy(plain)
    fast.__class__ = OneDnnLinear
    for layer in (plain, fast):
        layer(states).clamp_(-0.5, 0.5).square().sum().backward()
    assert plain.weight.grad is not None and fast.weight.grad is not None
    assert gap(fast.weight.grad, plain.weight.grad) < 1e-5


def test_a_model_has_the_same_loss_and_gradient_up_to_rounding_and_the_same_names(faster: None) -> None:
    plain = llama()
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert isinstance(fast.lm_head, OneDnnLinear) and list(fast.state_dict()) == list(plain.state_dict())
    assert fast.lm_head.weight is fast.get_input_embeddings().weight
    ids = torch.arange(60).view(2, 30)
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, copy.deepcopy(fast))]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for model in (plain, fast):
        model(input_ids=ids, labels=ids).loss.backward()
    for one, other in zip(plain.parameters(), fast.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and gap(other.grad, one.grad) < 1e-5


def test_small_models_other_types_and_other_processors_keep_their_layers(
    faster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small, half, other = llama(50), llama().to(torch.bfloat16), llama()
    use_onednn(small)
    use_onednn(half)
    monkeypatch.undo()
    (tmp_path / "cpuinfo").write_text("vendor_id : GenuineIntel\n", "utf-8")
    monkeypatch.setattr(onednn, "CPU_INFO", tmp_path / "cpuinfo")
    is_onednn_faster.cache_clear()
    use_onednn(other)
    assert not any(isinstance(module, OneDnnLinear) for model in (small, half, other) for module in model.modules())


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_onednn_counts_as_faster_on_amd_with_avx512_only(
    vendor: str, capability: str, faster: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n", "utf-8")
    monkeypatch.setattr(onednn, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    is_onednn_faster.cache_clear()
    assert is_onednn_faster() == faster


@pytest.mark.parametrize("prefix_tokens", [0, 5])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.usefixtures("faster")
def test_a_row_is_padded_once_and_not_in_each_layer(is_tree: bool, prefix_tokens: int) -> None:
    plain = llama()
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert use_tree_attention(plain) and use_tree_attention(fast)
    rows = set[int]()
    for layer in fast.model.modules():
        if isinstance(layer, OneDnnLinear):
            layer.register_forward_hook(lambda _, inputs, __: rows.add(inputs[0].shape[1]))
    ids = torch.arange(101)[None]
    positions = ends = None
    if is_tree:  # a chain of 21 tokens, with two branches of 40 tokens
        ends = torch.tensor([[101] * 21 + [61] * 40 + [101] * 40])
        positions = prefix_tokens + torch.tensor([[*range(61), *range(21, 61)]])
    found = []
    for model in (plain, fast):
        prefix = PrefixStates(backbone_of(model), torch.arange(prefix_tokens))
        rows.clear()
        states = hidden_states(model, ids, positions, ends, prefix)
        assert states.shape == (1, 101, 96)
        states.sin().sum().backward()  # not the squares: their sum is fixed by the last norm
        prefix.backward()
        found.append((states.detach(), *(cast(Tensor, weight.grad) for weight in model.model.parameters())))
    assert rows == {104}
    assert max(gap(one, other) for one, other in zip(*found, strict=True)) < 1e-5


@pytest.mark.usefixtures("faster")
def test_an_engine_has_the_products_of_a_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "SMALL_MODEL", 0)
    model = llama()
    use_onednn(model)
    served = copy.deepcopy(model)
    assert any(type(module) is OneDnnLinear for module in served.modules())
    TorchEngine(served, 64, EngineConfig(kv_cache_gib=0.1))
    assert not any(type(module) is OneDnnLinear for module in served.modules())
    assert any(type(module) is OneDnnLinear for module in model.modules())


def test_products_with_any_number_of_rows_use_few_shapes() -> None:
    lengths = [padded_length(rows) for rows in range(1, 16_385)]
    assert len(set(lengths)) == 72
    assert all(rows <= length <= max(rows + 7, 1.125 * rows) for rows, length in enumerate(lengths, 1))
