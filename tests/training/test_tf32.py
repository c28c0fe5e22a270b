"""TF32: who switches it on, and which differences then count as rounding errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import ProductPrecision
from agent_r1.inference.canary import BANDS, LogprobGap
from agent_r1.inference.model_runner import PROBE_TOLERANCE
from agent_r1.model.load import load_model
from agent_r1.model.weights import product_precision, set_product_precision
from agent_r1.trainer.single_process import describe_arithmetic
from agent_r1.training.config import GAP_LIMITS


@pytest.fixture(autouse=True)
def _restore_precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_gpu_multiplies_float32_in_tf32_and_a_cpu_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    set_product_precision("cuda:1", tf32=True)
    assert (product_precision("float32"), product_precision("bfloat16")) == ("tf32", "bfloat16")
    assert describe_arithmetic(False, None, "float32") == "products by PyTorch in TF32 and no shared prefixes"
    assert describe_arithmetic(False, None, "bfloat16") == "products by PyTorch and no shared prefixes"
    for device, tf32 in (("cuda:1", False), ("cpu", True)):
        torch.set_float32_matmul_precision("high")
        set_product_precision(device, tf32)
        assert product_precision("float32") == "float32"


def test_a_gpu_without_tf32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(InvalidInput, match="this GPU has no TF32"):
        set_product_precision("cuda", tf32=True)
    set_product_precision("cuda", tf32=False)


@pytest.mark.parametrize("limits", [GAP_LIMITS, PROBE_TOLERANCE])
def test_each_limit_on_rounding_errors_grows_with_lower_precision(limits: dict[ProductPrecision, float]) -> None:
    assert limits["float32"] < limits["tf32"] < limits["bfloat16"]


def to_tf32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 with 11 instead of 24 significant bits, rounded to the nearest, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@contextmanager
def imitated_tf32() -> Iterator[None]:
    """Round the inputs of linear layers and of attention to TF32, inside the ``with`` block."""
    linear, attend = functional.linear, functional.scaled_dot_product_attention

    def rounded_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(to_tf32(states), to_tf32(weight), bias)

    def rounded_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **settings: Any) -> Tensor:
        return attend(to_tf32(query), to_tf32(key), to_tf32(value), *rest, **settings)

    with (
        patch.object(functional, "linear", rounded_linear),
        patch.object(functional, "scaled_dot_product_attention", rounded_attention),
    ):
        yield


def test_rounding_to_tf32_is_within_the_limits_of_tf32_and_beyond_those_of_float32() -> None:
    model = load_model("tiny-base", torch.float32).eval()
    ids = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    exact = _scores(model, ids)
    with imitated_tf32():
        difference = (_scores(model, ids) - exact).abs()
    gap = LogprobGap(float(difference.mean()), float(difference.max()))
    assert gap.is_rounding("tf32") and not gap.is_rounding("float32"), (gap, BANDS)


@torch.no_grad()
def _scores(model: Any, ids: Tensor) -> Tensor:
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])
