"""Helpers that write and compare tensors in tests."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*values: float) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def units(*values: int) -> Tensor:
    """Return an int64 tensor."""
    return torch.tensor(values, dtype=torch.int64)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Return whether two tensors are equal up to ``tolerance``, relative and absolute."""
    return torch.allclose(found, expected.to(found), rtol=tolerance, atol=tolerance)
