"""The choice of the torch device."""

from __future__ import annotations

import torch

from agent_r1.core.errors import InvalidInput

FIRST_WITH_TF32 = (8, 0)
"""The compute capability of the first NVIDIA GPUs with TF32 (Ampere)."""


def choose_device(name: str) -> str:
    """Return ``name``, a torch device. If ``name`` is "auto", return a GPU if there is one, otherwise the CPU.
    Raise InvalidInput if ``name`` is a GPU and torch sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.startswith("cuda") and not has_gpu:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return name


def set_product_precision(device: str, tf32: bool) -> None:
    """Set whether this process multiplies float32 matrices in TF32 or in float32.

    TF32 is used if ``tf32`` is True and ``device`` is a GPU. In TF32, the inputs of a product have 11 instead of 24
    significant bits. Sums stay in float32. Raise InvalidInput if the GPU has no TF32.
    """
    uses_tf32 = tf32 and device.startswith("cuda")
    if uses_tf32 and torch.cuda.get_device_capability(device) < FIRST_WITH_TF32:
        raise InvalidInput("tf32", got="true", do="leave it out: this GPU has no TF32")
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
