"""An estimate, made before a run begins, of whether the run can fit in memory."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.model.forward import LOGITS_PER_CHUNK, hidden_states

PROBE_TOKENS = 32
"""Tokens of the forward pass that is measured. The activations of a layer grow linearly with the number of tokens."""

LOGIT_COPIES = 3
"""Tables of logits in memory at one time: the logits, their log-softmax, and its gradient."""

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A part of the required memory, and its size in bytes."""

    name: str
    size: int


def check_memory(model: PreTrainedModel, algorithm: Algorithm, context: int, available: int) -> None:
    """Raise InvalidInput if training ``model`` on one sequence of ``context`` tokens exceeds ``available`` bytes.

    The estimate covers the weights, the optimizer and the training pass over one sequence of action tokens. The
    engine's cache, the tools, the allocator and the other sequences of a micro-batch need more memory, so a run that
    passes this check can still run out of memory.
    """
    fixed = list(fixed_uses(model, algorithm))
    per_token = (1 + ("critic" in algorithm.needs)) * activation_bytes(model)

    def uses_of(tokens: int) -> list[MemoryUse]:
        sequence = MemoryUse(f"one sequence of {tokens} tokens", tokens * per_token + logit_bytes(model, tokens))
        return [*fixed, sequence]

    def total_of(tokens: int) -> int:
        return sum(use.size for use in uses_of(tokens))

    uses, total = uses_of(context), total_of(context)
    if total <= available:
        return
    do = "take a smaller model, or a machine with more memory"
    if fits := bisect_right(range(1, context), available, key=total_of):
        do = f"lower --context to {fits} or less, or {do}"
    parts = ", ".join(f"{use.name} {_gib(use.size)}" for use in uses)
    raise InvalidInput("memory", got=f"{_gib(available)}, but at least {_gib(total)} are needed ({parts})", do=do)


def fixed_uses(model: PreTrainedModel, algorithm: Algorithm) -> Iterator[MemoryUse]:
    """Yield the memory that does not depend on the sequences: weights, gradients, optimizer moments."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    trained = 1 + ("critic" in algorithm.needs)
    frozen = ("reference" in algorithm.needs) + ("teacher" in algorithm.needs)
    engine = 1
    yield MemoryUse("weights of trainer and engine", (engine + trained + frozen) * weights)
    yield MemoryUse("gradients and moments", 3 * trained * weights)


def logit_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes of the logits that are in memory at one time, in float32."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return LOGIT_COPIES * 4 * vocabulary * min(tokens, max(1, LOGITS_PER_CHUNK // vocabulary))


def activation_bytes(model: PreTrainedModel) -> int:
    """Return the bytes per token that a forward pass keeps for the backward pass, measured on a short sequence."""
    with torch.autograd.graph.saved_tensors_hooks(saved := _SavedBytes(model), lambda tensor: tensor):
        ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)
        hidden_states(model, ids)
    return saved.size // PROBE_TOKENS


class _SavedBytes:
    """Counts the bytes of the tensors that autograd saves. Each storage counts once, parameters do not count."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._counted = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._alive: list[Tensor] = []  # a freed storage could give its address to a new one
        self.size = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self._alive.append(tensor)
            self.size += storage.nbytes()
        return tensor


def available_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes: the GPU's, or the smaller of the machine's and the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CGROUP_LIMITS:
        text = file.read_text().strip() if file.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
