"""Measure how much memory the KV cache of the embedded engine reserves, beside the tokens that it holds.

    python benchmarks/kv_cache.py

32 sequences of a random Llama model are prefilled in a random order into a block of 32 slots. The context has 8,192
tokens. The table has the tokens of the sequences, the tokens for which the block has room, and the tokens of a cache
that reserves the whole context, or pages of 16 tokens, for each sequence.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from decode import random_llama
from rich.console import Console
from rich.table import Table

from agent_r1.inference.kv_cache import CacheSlot, round_up
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk
from agent_r1.inference.native_decode import choose_native

ROWS, CONTEXT, PAGE = 32, 8192, 16


def lengths_by_case(rng: random.Random) -> Mapping[str, Sequence[int]]:
    """Return the lengths of the sequences by the name of a case."""
    return {
        "all 1,000": [1000] * ROWS,
        "100 to 2,000": [rng.randint(100, 2000) for _ in range(ROWS)],
        "one 2,000, others 200": [200] * (ROWS - 1) + [2000],
        "one 8,000, others 200": [200] * (ROWS - 1) + [8000],
    }


def reserved_tokens(lengths: Sequence[int]) -> tuple[int, float]:
    """Return the tokens for which the KV cache has room after the sequences are prefilled, and its size in MiB."""
    model = random_llama("0.2M")
    runner = ModelRunner(model, ROWS, native=choose_native("auto", model))
    block = runner.add_block()
    for row, length in enumerate(lengths):
        runner.prefill([PrefillChunk(CacheSlot(block, row), (), tuple(token % 500 for token in range(length)))])
    (cache,) = runner.blocks
    return cache.rows * cache.capacity, cache.bytes / 2**20


def main() -> None:
    rng = random.Random(0)
    table = Table("lengths", "tokens", "reserved", "MiB", "reserved / tokens", "context / tokens", "pages / tokens")
    for name, lengths in lengths_by_case(rng).items():
        tokens = sum(lengths)
        reserved, size = reserved_tokens(rng.sample(lengths, len(lengths)))
        pages = sum(round_up(length, PAGE) for length in lengths)
        ratios = [f"{each / tokens:.2f}" for each in (reserved, ROWS * CONTEXT, pages)]
        table.add_row(name, f"{tokens:,}", f"{reserved:,}", f"{size:.0f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
