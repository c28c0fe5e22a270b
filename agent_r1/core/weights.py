"""Versions of the policy, and how new weights reach an inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Transport = Literal["shared_memory", "safetensors", "lora", "nccl"]
"""How an engine obtains weights. shared_memory: as a PyTorch module in the same process. safetensors: from a folder of
safetensors files. lora: from the folder of a LoRA adapter. nccl: by a broadcast between GPUs."""


Dtype = Literal["float32", "bfloat16"]

ProductPrecision = Literal["float32", "tf32", "bfloat16"]
"""The precision of matrix products: 24, 11 or 8 significant bits. TF32 is a mode of GPUs for tensors in float32."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the policy's weights.

    Attributes:
        number: the version number; the initial weights of a run have the number 0.
        step: the optimizer step that made these weights.
        checksum: the sha256 of all tensors; None if no checksum was computed.

    Example:
        PolicyVersion(number=3, step=3, checksum="9f86d0..")
    """

    number: int
    step: int
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """A fixed prompt with log-probabilities from the trainer, to test which weights a server serves.

    Attributes:
        token_ids: (n,) the tokens of the prompt.
        logprobs: (n - 1,) the log-probability of each token except the first, at temperature 1.
        next_logprobs: the log-probabilities of the most likely next tokens, by token id, at the temperature
            ``TEMPERATURE`` of ``inference/canary.py``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    next_logprobs: Mapping[int, float]


Canary = tuple[CanaryPrompt, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """A LoRA adapter in the format of peft, and the frozen weights of its base model, as folders of
    safetensors files.
    """

    adapter: Path
    base: Path


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A reference to new weights.

    Attributes:
        version: the version that an engine serves after the update.
        transport: how the engine obtains the weights (see :data:`Transport`).
        handle: depends on ``transport``. "shared_memory": the module. "safetensors": the folder. "lora": the
            :class:`AdapterFolders`. "nccl": the name of the process group.
        canary: prompts that test whether the engine has these weights; () if the engine reports a checksum.

    Example:
        WeightUpdate(version=PolicyVersion(3, step=3), transport="safetensors", handle=Path("/dev/shm/run/version-3"))
    """

    version: PolicyVersion
    transport: Transport
    handle: object
    canary: Canary = ()
