"""Short ways to write tensors and to compare them, in tests."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def units(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    return torch.allclose(found, expected.to(found), rtol=tolerance, atol=tolerance)
