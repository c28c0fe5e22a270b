"""The limits of a core, and what a training step computes and reads per CPU second beside them.

The limits are measured: large matrix products, and copies of tensors that fit into no cache. All times are CPU seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from transformers import LlamaForCausalLM

from agent_r1.core.profile import CPU_SECONDS
from agent_r1.model.onednn import PLAIN_LINEAR


@dataclass(frozen=True)
class Limits:
    """The speed of a core: GFLOP/s in large matrix products, and GB/s read and written in copies.

    The products are those of the faster one of PyTorch's libraries, MKL and oneDNN.
    """

    products: float
    copies: float


@dataclass(frozen=True)
class StepWork:
    """The work of a step.

    Attributes:
        model_tokens: the tokens that the passes of the update read.
        actions: the sampled tokens.
        decode_steps: the decode steps, each for all running attempts.
        contexts: the tokens before each sampled token, summed over all sampled tokens.
    """

    model_tokens: float
    actions: float
    decode_steps: int
    contexts: float


@dataclass(frozen=True)
class Rates:
    """What a step of Agent-R1 computes and reads per CPU second. The products of the attention are not counted.

    Attributes:
        learning: GFLOP/s of the forward and backward passes, with six operations for each weight and token.
        decoding: GFLOP/s of the decode steps, with two operations for each weight and token.
        reading: GB/s of the weights, keys and values that the decode steps read.
    """

    learning: float
    decoding: float
    reading: float


def rates_of(model: LlamaForCausalLM, work: StepWork, profile: Mapping[str, float]) -> Rates:
    """Return what a step computes and reads per CPU second. ``profile`` says where the time of the step went."""
    weights, head = model.num_parameters(), model.get_output_embeddings().weight.numel()  # tied: the head counts once
    attention = model.model.layers[0].self_attn
    cache = len(model.model.layers) * (attention.k_proj.out_features + attention.v_proj.out_features)  # per token
    learning, decoding = (
        sum(profile[CPU_SECONDS + part] for part in parts) for parts in (("forward", "backward"), ("generation",))
    )
    return Rates(
        6e-9 * ((weights - head) * work.model_tokens + head * work.actions) / learning,
        2e-9 * weights * work.actions / decoding,
        4e-9 * (weights * work.decode_steps + cache * work.contexts) / decoding,
    )


def measure_limits() -> Limits:
    """Return the limits of a core, in CPU seconds of the process."""
    torch.set_num_threads(1)
    matrix, source = torch.randn(1024, 1024), torch.randn(1 << 26)
    target = torch.empty_like(source)
    with torch.no_grad():
        products = [seconds_of(partial(kind(1024, 1024, bias=False), matrix)) for kind in PLAIN_LINEAR]
    copies = seconds_of(lambda: target.copy_(source))
    return Limits(2 * 1.024**3 / min(products), 2 * source.nbytes / copies / 1e9)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call, the mean of ten calls after a first one."""
    work()
    start = time.process_time()
    for _ in range(10):
        work()
    return (time.process_time() - start) / 10


def limits_table(measured: Mapping[str, Rates], limits: Limits) -> Table:
    """Return the table that compares a step of Agent-R1 with the limits of a core."""
    title = f"limits of a core: {limits.products:.0f} GFLOP/s in products, {limits.copies:.1f} GB/s in copies"
    headers = ("forward, backward GFLOP/s", "share", "decode GFLOP/s", "share", "decode GB/s", "share")
    table = Table("model", *headers, title=title)
    for name, rates in measured.items():
        cells = [name]
        for rate, limit in (
            (rates.learning, limits.products),
            (rates.decoding, limits.products),
            (rates.reading, limits.copies),
        ):
            cells += [f"{rate:.1f}", f"{rate / limit:.0%}"]
        table.add_row(*cells)
    return table
