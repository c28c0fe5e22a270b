"""Measure how much memory the KV cache of the embedded engine takes, beside the tokens that it holds.

    python benchmarks/kv_cache.py

32 sequences of a random Llama model with heads of 64 are prefilled in a random order into a block of 32 slots. The
context has 8,192 tokens. The table has the tokens of the sequences, the growth of the process while they are prefilled,
and the tokens for which this memory has room, divided by the tokens of the sequences. The baselines are a cache that
reserves the whole context, and a cache of pages of 16 tokens, for each sequence.

The second table has the CPU seconds in which an engine generates 64 completions of 60 tokens, if its cache has memory
for three whole contexts: once if each sequence takes pages as it grows, and once if it takes those of a whole context.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode import random_llama
from rich.console import Console
from rich.table import Table

from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.inference import torch_engine
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import CacheSize, CacheSlot, cache_size, pages_for, round_up
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk
from agent_r1.inference.native_decode import choose_native
from agent_r1.inference.torch_engine import TorchEngine

ROWS, CONTEXT, PAGE = 32, 8192, 16
KV_BYTES = 5 * 2 * 4 * 64 * 4
"""The size of the keys and values of a token: layers * (keys, values) * heads * head size * bytes of a number."""


def lengths_by_case(rng: random.Random) -> Mapping[str, Sequence[int]]:
    """Return the lengths of the sequences by the name of a case."""
    return {
        "all 1,000": [1000] * ROWS,
        "100 to 2,000": [rng.randint(100, 2000) for _ in range(ROWS)],
        "one 2,000, others 200": [200] * (ROWS - 1) + [2000],
        "one 8,000, others 200": [200] * (ROWS - 1) + [8000],
    }


def resident_bytes() -> int:
    """Return how many bytes of this process are in memory."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cache_bytes(lengths: Sequence[int]) -> tuple[int, int]:
    """Return (memory that the KV cache takes after the sequences are prefilled, memory of one token), in bytes."""
    model = random_llama("5M")
    runner = ModelRunner(model, ROWS, native=choose_native("native", model), capacity=CONTEXT + 64)
    block = runner.add_block()
    runner.prefill([PrefillChunk(CacheSlot(block, 0), (), (1,) * CONTEXT)])  # intermediate results exist from now on
    runner.empty([CacheSlot(block, 0)])
    before = resident_bytes()
    for row, length in enumerate(lengths):
        runner.prefill([PrefillChunk(CacheSlot(block, row), (), tuple(token % 500 for token in range(length)))])
    return resident_bytes() - before, runner.blocks[block].bytes_per_token


async def generate(reserves_context: bool) -> tuple[float, int]:
    """Return (CPU seconds of 64 completions, largest number of sequences that ran at the same time)."""

    def size_of(*arguments: Any, **options: Any) -> CacheSize:
        size = cache_size(*arguments, **options)
        return replace(size, session_pages=pages_for(CONTEXT + 1)) if reserves_context else size

    with patch.object(torch_engine, "cache_size", size_of):
        settings = EngineConfig(decode_step="native", kv_cache_gib=3.05 * (CONTEXT + 64) * KV_BYTES / 2**30)
        engine = TorchEngine(random_llama("5M"), CONTEXT, settings)
    most = 0

    def watch(_: Sequence[int]) -> None:
        nonlocal most
        most = max(most, len(engine._scheduler._running))

    async def one(index: int) -> None:
        prompt = tuple((7 * index + place) % 500 + 5 for place in range(100 + index % 40))
        sampling = SamplingParams(max_tokens=60, seed=index, on_tokens=watch)
        await engine.generate(Prompt(prompt), sampling, session_id=str(index))
        await engine.release(str(index))

    start = time.process_time()
    await asyncio.gather(*(one(index) for index in range(64)))
    seconds = time.process_time() - start
    await engine.close()
    return seconds, most


def generation_table() -> Table:
    """Return the table of the CPU seconds for 64 completions, the median of five runs in turns."""
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for _ in range(5):
        for reserves_context, runs in found.items():
            runs.append(asyncio.run(generate(reserves_context)))
    table = Table("a sequence takes", "sequences at a time", "CPU s", "ratio")
    slow, fast = (statistics.median(seconds for seconds, _ in found[kind]) for kind in (True, False))
    table.add_row("a whole context", str(max(most for _, most in found[True])), f"{slow:.2f}", f"{slow / fast:.1f}")
    table.add_row("pages as it grows", str(max(most for _, most in found[False])), f"{fast:.2f}", "1.0")
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rng = random.Random(0)
    table = Table("lengths", "tokens", "MiB", "cache / tokens", "context / tokens", "pages / tokens")
    for name, lengths in lengths_by_case(rng).items():
        tokens = sum(lengths)
        size, of_token = cache_bytes(rng.sample(lengths, len(lengths)))
        pages = sum(round_up(length, PAGE) for length in lengths)
        ratios = [f"{each / tokens:.2f}" for each in (size / of_token, ROWS * CONTEXT, pages)]
        table.add_row(name, f"{tokens:,}", f"{size / 2**20:.0f}", *ratios)
    Console().print(table)
    Console().print(generation_table())


if __name__ == "__main__":
    main()
