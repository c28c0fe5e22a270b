"""Measure decode steps that compute only the running rows, beside steps that compute whole blocks, in one run.

    python benchmarks/decode.py

Random Llama models of 14M and 135M parameters decode with 1, 4, 16 and 64 running sequences of 600 tokens, in a block
of 64 rows, with one thread of torch. Both kinds of steps take turns, and the medians of their CPU seconds are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy

ROWS, CONTEXT = 64, 600
MODELS = {"14M": (4096, 320, 10, 5, 5), "135M": (49152, 576, 30, 9, 3)}
"""Vocabulary, width, layers, attention heads and key-value heads by name."""


def runner_of(name: str) -> ModelRunner:
    """Return a runner with a block in which every row holds a sequence."""
    vocabulary, width, layers, heads, kv_heads = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
    )  # fmt: skip
    runner = ModelRunner(LlamaForCausalLM(config), ROWS)
    first = CacheSlot(runner.add_block(), 0)
    runner.prefill([PrefillChunk(first, 0, tuple(range(CONTEXT)))])
    runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, row), CONTEXT) for row in range(1, ROWS)])
    return runner


def step_seconds(runner: ModelRunner, running: int, steps: int) -> float:
    """Return the CPU seconds of a decode step. The sequences do not become longer."""
    start = time.process_time()
    for _ in range(steps):
        runner.decode(0, dict.fromkeys(range(0, ROWS, ROWS // running), 7))
        runner.blocks[0].lengths.fill_(CONTEXT)
    return (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("model", "running", "ms, whole block", "ms, running rows", "ratio")
    for name in MODELS:
        runner = runner_of(name)
        by_rows = runner._row_decoder
        for running in (1, 4, 16, 64):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(arguments.repeats):
                for rows_only, taken in seconds.items():
                    runner._row_decoder = by_rows if rows_only else None
                    taken.append(step_seconds(runner, running, steps=2))
            whole, rows = (1000 * statistics.median(seconds[rows_only]) for rows_only in (False, True))
            table.add_row(name, str(running), f"{whole:.1f}", f"{rows:.1f}", f"{whole / rows:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
