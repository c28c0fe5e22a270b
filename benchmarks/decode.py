"""Measure decode steps in one run: PyTorch and the native step, each with weights in float32 and in bfloat16.

    python benchmarks/decode.py
    python benchmarks/decode.py 14M 60M 135M --context 600

Random Llama models decode with 1, 8, 32 and 64 running sequences, in a block of 64 rows, with one thread. The kinds of
steps take turns, and the medians of their CPU seconds are compared. PyTorch computes whole blocks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy
from agent_r1.inference.native_decode import choose_native
from agent_r1.model.weights import cast_parameters

ROWS = 64
MODELS = {
    "0.2M": (600, 64, 192, 3, 4, 4),  # as tiny-base
    "0.5M": (4096, 64, 192, 4, 4, 4),
    "1M": (4096, 128, 384, 2, 4, 4),
    "5M": (4096, 256, 768, 5, 4, 4),
    "14M": (4096, 320, 960, 10, 5, 5),
    "60M": (4096, 640, 1920, 11, 10, 10),
    "135M": (49152, 576, 1536, 30, 9, 3),  # as SmolLM2-135M
    "494M": (151936, 896, 4864, 24, 14, 2),  # as Qwen2.5-0.5B
}
"""Vocabulary, width, inner width, layers, attention heads and key-value heads by name."""

KINDS = ("PyTorch, float32", "PyTorch, bfloat16", "native, float32", "native, bfloat16")


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
    """Return a runner for each kind of step, in which every row holds a sequence."""
    wide = random_llama(name)
    models = {"float32": wide, "bfloat16": cast_parameters(copy.deepcopy(wide), "bfloat16")}
    native = {dtype: choose_native("native", model) for dtype, model in models.items()}
    runners = {}
    for kind in KINDS:
        path, dtype = kind.split(", ")
        decoder = native[dtype] if path == "native" else None
        runners[kind] = runner = ModelRunner(models[dtype], ROWS, native=decoder)
        first = CacheSlot(runner.add_block(), 0)
        runner.prefill([PrefillChunk(first, (), tuple(range(context)))])
        runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, row), context) for row in range(1, ROWS)])
    return runners


def step_seconds(runner: ModelRunner, running: int, steps: int) -> float:
    """Return the seconds of a decode step, of the processor with one thread, else of the clock. Lengths stay."""
    lengths = runner.blocks[0].lengths.clone()
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(steps):
        runner.decode(0, dict.fromkeys(range(0, ROWS, ROWS // running), 7))
        runner.blocks[0].lengths.copy_(lengths)
    return (clock() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"some of {', '.join(MODELS)}; none: up to 14M")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table("model", "running", *(f"ms, {kind}" for kind in KINDS), "float32 ratio", "bfloat16 ratio")
    for name in arguments.models or list(MODELS)[:5]:
        runners = runners_of(name, arguments.context)
        for running in (1, 8, 32, 64):
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(arguments.repeats):
                for kind, runner in runners.items():
                    seconds[kind].append(step_seconds(runner, running, steps=3))
            medians = [1000 * statistics.median(seconds[kind]) for kind in KINDS]
            ratios = (medians[0] / medians[2], medians[1] / medians[3])
            table.add_row(name, str(running), *(f"{ms:.2f}" for ms in medians), *(f"{ratio:.1f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
