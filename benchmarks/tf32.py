"""Measure how far results differ if products are in TF32, imitated on a CPU.

    python benchmarks/tf32.py
    python benchmarks/tf32.py --models tiny-base smollm2-135m

The inputs of all products in linear layers and in attention are rounded to 11 significant bits, and sums stay in
float32, as a GPU does in TF32. Random tokens are computed once in one pass, and once token by token with the KV cache.
The table has the largest difference between the logits, as a share of the largest logit, and the mean and largest
difference between the log-probabilities of the tokens. The baseline is float32. The last row compares TF32 with float32
in a single pass: engine and trainer differ by this much if only one of them uses TF32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from agent_r1.model.load import load_model

SEQUENCES, LENGTH, PROMPT = 3, 96, 40


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


def in_one_pass(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def token_by_token(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of ``ids`` (B, T), of which the first ``PROMPT`` are computed together: (B, T, V)."""
    made = model(input_ids=ids[:, :PROMPT], use_cache=True)
    parts = [made.logits]
    for place in range(PROMPT, LENGTH):
        made = model(input_ids=ids[:, place : place + 1], past_key_values=made.past_key_values, use_cache=True)
        parts.append(made.logits)
    return torch.cat(parts, 1)


def compare(first: Tensor, second: Tensor, ids: Tensor) -> tuple[float, float, float]:
    """Return the differences that the table has: of the logits, and the mean and largest of the log-probabilities."""

    def scores(logits: Tensor) -> Tensor:
        return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])

    gap = (scores(first) - scores(second)).abs()
    return float((first - second).abs().max() / first.abs().max()), float(gap.mean()), float(gap.max())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-base"])
    table = Table("model", "compared", "logits", "log-probability, mean", "largest")
    for name in parser.parse_args().models:
        model = load_model(name, torch.float32).eval()
        vocabulary = int(model.config.get_text_config().vocab_size)
        ids = torch.randint(vocabulary, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
        contexts: dict[str, Callable[[], Any]] = {"float32": nullcontext, "TF32": imitated_tf32}
        passes: dict[str, Tensor] = {}
        for label, context in contexts.items():
            with context():
                passes[label] = in_one_pass(model, ids)
                row = compare(passes[label], token_by_token(model, ids), ids)
            table.add_row(name, f"{label}, with and without KV cache", *(f"{value:.1e}" for value in row))
        both = compare(passes["float32"], passes["TF32"], ids)
        table.add_row(name, "float32 and TF32, one pass", *(f"{value:.1e}" for value in both))
    Console().print(table)


if __name__ == "__main__":
    main()
