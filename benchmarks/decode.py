"""Measure decode steps in one run: PyTorch on whole blocks, PyTorch on the running rows, and the native step.

    python benchmarks/decode.py
    python benchmarks/decode.py 14M 60M 135M --context 600

Random Llama models decode with 1, 4, 16 and 64 running sequences, in a block of 64 rows, with one thread. The three
kinds of steps take turns, and the medians of their CPU seconds are compared. In PyTorch, the engine computes running
rows for models of 10 million parameters and more, and whole blocks for smaller models.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.inference import model_runner
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy
from agent_r1.inference.native_decode import choose_native

ROWS = 64
MODELS = {
    "0.2M": (600, 64, 192, 3, 4, 4),  # as tiny-base
    "0.5M": (4096, 64, 192, 4, 4, 4),
    "1M": (4096, 128, 384, 2, 4, 4),
    "5M": (4096, 256, 768, 5, 4, 4),
    "14M": (4096, 320, 960, 10, 5, 5),
    "60M": (4096, 640, 1920, 11, 10, 10),
    "135M": (49152, 576, 1536, 30, 9, 3),  # as SmolLM2-135M
}
"""Vocabulary, width, inner width, layers, attention heads and key-value heads by name."""

KINDS = ("whole block", "running rows", "native")


def random_llama(name: str) -> LlamaForCausalLM:
    """Return the model ``name`` of ``MODELS`` with random weights."""
    vocabulary, width, inner, layers, heads, kv_heads = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def runners_of(name: str, context: int) -> dict[str, ModelRunner]:
    """Return a runner for each kind of step, with a common block in which every row holds a sequence."""
    model = random_llama(name)
    native = choose_native("native", model)
    runners = {}
    for kind, large_from in zip(KINDS, (10**12, 0, 0), strict=True):
        model_runner.LARGE_MODEL = large_from
        runners[kind] = ModelRunner(model, ROWS, native=native if kind == "native" else None)
    runner = runners["whole block"]
    first = CacheSlot(runner.add_block(), 0)
    runner.prefill([PrefillChunk(first, (), tuple(range(context)))])
    runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, row), context) for row in range(1, ROWS)])
    for other in runners.values():
        other.blocks = runner.blocks
    return runners


def step_seconds(runner: ModelRunner, running: int, steps: int) -> float:
    """Return the CPU seconds of a decode step. The sequences do not become longer."""
    lengths = runner.blocks[0].lengths.clone()
    start = time.process_time()
    for _ in range(steps):
        runner.decode(0, dict.fromkeys(range(0, ROWS, ROWS // running), 7))
        runner.blocks[0].lengths.copy_(lengths)
    return (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)}; none: up to 14M")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    headers = (f"ms, {kind}" for kind in KINDS)
    table = Table("model", "running", *headers, "whole / native", "running rows / native")
    for name in arguments.models or list(MODELS)[:5]:
        runners = runners_of(name, arguments.context)
        for running in (1, 4, 16, 64):
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(arguments.repeats):
                for kind, runner in runners.items():
                    seconds[kind].append(step_seconds(runner, running, steps=3))
            whole, rows, native = (1000 * statistics.median(seconds[kind]) for kind in KINDS)
            figures = (f"{whole:.2f}", f"{rows:.2f}", f"{native:.2f}", f"{whole / native:.1f}", f"{rows / native:.1f}")
            table.add_row(name, str(running), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
