"""The choice of the torch device."""

from __future__ import annotations

import torch

from agent_r1.core.errors import InvalidInput


def choose_device(name: str) -> str:
    """Return the torch device ``name``; for "auto", a GPU if there is one, otherwise the CPU.

    Raise InvalidInput if ``name`` is a GPU and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return name


def set_product_precision(device: str, tf32: bool) -> None:
    """Let GPUs multiply float32 matrices in TF32 or, if ``tf32`` is False, in float32, in all threads of this process.

    In TF32, the inputs of a product have 11 instead of 24 significant bits. Sums stay in float32. No effect if
    ``device`` is a CPU.
    """
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
