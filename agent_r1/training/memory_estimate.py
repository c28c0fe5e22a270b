"""Whether a run can fit in memory at all, with numbers, before it begins."""

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
from agent_r1.model.forward import LOGITS_AT_ONCE, hidden_states

PROBE_TOKENS = 32
"""Tokens of the forward pass that is measured: what a layer keeps for its backward pass grows with their number."""

LOGIT_COPIES = 3
"""Tables of logits at one time: the logits, their log-softmax, and its gradient."""

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """Something that will lie in memory, and its bytes."""

    what: str
    size: int


def check_memory(model: PreTrainedModel, row: Algorithm, context: int, room: int) -> None:
    """Raise InvalidInput where training ``model`` on one sequence of ``context`` tokens needs more than ``room`` bytes.

    Counted is what is there at one time when such a sequence is learned from, actions throughout. What the engine's
    cache, the tools, the allocator and the other sequences of a pass take comes on top: passing is no promise.
    """
    fixed = list(fixed_needs(model, row))
    per_token = (1 + ("critic" in row.needs)) * kept_bytes(model)

    def needs_of(tokens: int) -> list[Need]:
        sequence = Need(f"one sequence of {tokens} tokens", tokens * per_token + logit_bytes(model, tokens))
        return [*fixed, sequence]

    def total_of(tokens: int) -> int:
        return sum(need.size for need in needs_of(tokens))

    needs, total = needs_of(context), total_of(context)
    if total <= room:
        return
    do = "take a smaller model, or a machine with more memory"
    if fits := bisect_right(range(1, context), room, key=total_of):
        do = f"lower --context to {fits} or less, or {do}"
    parts = ", ".join(f"{need.what} {_gib(need.size)}" for need in needs)
    raise InvalidInput("memory", got=f"{_gib(room)}, where at least {_gib(total)} are needed ({parts})", do=do)


def fixed_needs(model: PreTrainedModel, row: Algorithm) -> Iterator[Need]:
    """What lies in memory whatever the sequences: weights, gradients, the optimizer's moments."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    trained = 1 + ("critic" in row.needs)
    others = ("reference" in row.needs) + ("teacher" in row.needs)
    yield Need("weights of learner and engine", (1 + trained + others) * weights)
    yield Need("gradients and moments", 3 * trained * weights)


def logit_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the logits that are made at one time."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return LOGIT_COPIES * 4 * vocabulary * min(tokens, max(1, LOGITS_AT_ONCE // vocabulary))


def kept_bytes(model: PreTrainedModel) -> int:
    """Bytes per token of a forward pass that are kept for the backward pass, measured, not guessed."""
    with torch.autograd.graph.saved_tensors_hooks(kept := _Kept(model), lambda tensor: tensor):
        ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=model.device)
        hidden_states(model, ids)
    return kept.size // PROBE_TOKENS


class _Kept:
    """Counts the bytes of tensors that autograd keeps, each storage once, parameters apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._alive: list[Tensor] = []  # a storage that is freed would lend its address to the next
        self.size = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._alive.append(tensor)
            self.size += storage.nbytes()
        return tensor


def room_of(device: torch.device) -> int:
    """All the memory that a process may ever have on a device, in bytes: a GPU's, or the machine's or container's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CGROUP_LIMITS:
        text = file.read_text().strip() if file.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
