"""Measure the embedded engine and the trainer on one NVIDIA GPU, beside the limits of this GPU.

    python benchmarks/gpu.py limits decode rollout step
    python benchmarks/gpu.py step --models 0.5B --precisions bfloat16

Models have random weights in the shapes of SmolLM2-135M and Qwen2.5. All figures are wall times after a warm-up.

- limits: large matrix products and copies.
- decode: one decode step of 64 running sequences. The floor is the time in which the measured copies would read the
  weights, keys and values once.
- rollout: 64 prompts of 128 tokens, 128 tokens sampled for each, by transformers.generate and by the embedded engine.
- step: GRPO on 8 groups of 8 attempts with two actions of 64 tokens, as in benchmarks/peers.py. "used" is the share of
  the measured products that forward and backward passes reach, with six operations for each weight of the layers and
  token. "peak" is the largest memory that PyTorch allocated; the estimate is the run's own, before it began.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from peers import Dialogue, Shape, random_reward, write_model
from transformers import LlamaConfig, LlamaForCausalLM

import agent_r1
from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.profile import SECONDS, mean_profile
from agent_r1.core.task import Task
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.kv_cache import CacheSlot
from agent_r1.inference.model_runner import ModelRunner, PrefillChunk, PrefixCopy
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.weights import cast_parameters, set_product_precision
from agent_r1.store.reader import RunReader
from agent_r1.training import build
from agent_r1.training.memory_estimate import MemoryPlan, plan_memory
from agent_r1.training.progress import SilentProgress

Precision = Literal["float32", "tf32", "bfloat16"]
SECTIONS = ("limits", "decode", "rollout", "step")
SHAPES = {
    "0.2M": Shape(64, 192, 3, 4, 4, vocabulary=600),
    "135M": Shape(576, 1536, 30, 9, 3, vocabulary=49152),
    "0.5B": Shape(896, 4864, 24, 14, 2, vocabulary=151936),
    "1.5B": Shape(1536, 8960, 28, 12, 2, vocabulary=151936),
    "3B": Shape(2048, 11008, 36, 16, 2, vocabulary=151936),
    "7B": Shape(3584, 18944, 28, 28, 4, vocabulary=152064),
}
ROWS, CONTEXT = 64, 512
PROMPT, ACTION = 128, 128
GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """Measured limits: operations per second of matrix products by precision, bytes per second of copies."""

    products: dict[Precision, float]
    copies: float


def seconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median wall time of ``work`` after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def dtype_of(precision: Precision) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if precision == "bfloat16" else "float32"


@contextlib.contextmanager
def products_in(precision: Precision, device: str) -> Iterator[None]:
    set_product_precision(device, tf32=precision == "tf32")
    try:
        yield
    finally:
        set_product_precision(device, tf32=False)


def measure_limits(precisions: Sequence[Precision], device: str, size: int) -> Limits:
    products: dict[Precision, float] = {}
    for precision in precisions:
        matrix = torch.randn(size, size, device=device, dtype=getattr(torch, dtype_of(precision)))
        with products_in(precision, device):
            products[precision] = 2 * size**3 / seconds_of(partial(torch.matmul, matrix, matrix))
    source = torch.empty(size**2 * 4, device=device)
    target = torch.empty_like(source)
    return Limits(products, 2 * source.nbytes / seconds_of(partial(target.copy_, source)))


def random_llama(name: str, precision: Precision, device: str) -> LlamaForCausalLM:
    shape = SHAPES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True, max_position_embeddings=16384,
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    return cast_parameters(model, dtype_of(precision))


def decode_rows(models: Sequence[str], precisions: Sequence[Precision], device: str, limits: Limits) -> Iterator[Any]:
    """Yield a row of the table of decode steps for each model and precision."""
    for name in models:
        for precision in precisions:
            with products_in(precision, device):
                model = random_llama(name, precision, device)
                token, cache_bytes = bytes_read(model, name)
                floor = (token + ROWS * CONTEXT * cache_bytes) / limits.copies
                step = seconds_of(partial(decode_once, filled_runner(model)))
                prefill = seconds_of(partial(prefill_once, model))
            figures = (1000 * step, 1000 * floor, step / floor, 1000 * prefill)
            yield name, precision, *(f"{figure:.2f}" for figure in figures)


def bytes_read(model: LlamaForCausalLM, name: str) -> tuple[int, int]:
    """Return the bytes of all weights, and the bytes of a token's keys and values."""
    shape, size = SHAPES[name], model.dtype.itemsize
    head_size = shape.width // shape.heads
    return sum(one.numel() for one in model.parameters()) * size, 2 * shape.layers * shape.kv_heads * head_size * size


def filled_runner(model: LlamaForCausalLM) -> ModelRunner:
    """Return a runner in which each row of a block holds ``CONTEXT`` tokens."""
    runner = ModelRunner(model, ROWS, capacity=2 * CONTEXT)
    first = CacheSlot(runner.add_block(), 0)
    runner.prefill([PrefillChunk(first, (), tuple(range(CONTEXT)))])
    runner.copy_prefixes([PrefixCopy(first, CacheSlot(0, row), CONTEXT) for row in range(1, ROWS)])
    return runner


def decode_once(runner: ModelRunner) -> None:
    runner.decode(0, dict.fromkeys(range(ROWS), 7))
    runner.blocks[0].lengths.fill_(CONTEXT)


def prefill_once(model: LlamaForCausalLM) -> None:
    runner = ModelRunner(model, ROWS, capacity=2 * CONTEXT)
    runner.add_block()
    prompt = tuple(range(PROMPT))
    runner.prefill([PrefillChunk(CacheSlot(0, row), (), prompt) for row in range(ROWS)])


def rollout_rows(models: Sequence[str], precisions: Sequence[Precision], device: str) -> Iterator[Any]:
    """Yield a row of the table of rollouts for each model and precision: tokens per second."""
    drawn = random.Random(0)
    prompts = [drawn.choices(range(256), k=PROMPT) for _ in range(ROWS)]
    for name in models:
        for precision in precisions:
            with products_in(precision, device):
                model = random_llama(name, precision, device)
                generated = ROWS * ACTION / seconds_of(partial(generate, model, prompts, device), 2)
                engine = TorchEngine(model, PROMPT + ACTION, EngineConfig(dtype=dtype_of(precision)))
                sampled = ROWS * ACTION / seconds_of(partial(sample, engine, prompts), 2)
            yield name, precision, f"{generated:,.0f}", f"{sampled:,.0f}", f"{sampled / generated:.1f}"


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], device: str) -> None:
    ids = torch.tensor(prompts, device=device)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": ACTION, "min_new_tokens": ACTION}
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)


def sample(engine: TorchEngine, prompts: Sequence[Sequence[int]]) -> None:
    async def batch() -> None:
        params = (SamplingParams(max_tokens=ACTION, seed=seed) for seed in range(len(prompts)))
        await asyncio.gather(*(engine.generate(Prompt(tuple(one)), p) for one, p in zip(prompts, params, strict=True)))

    asyncio.run(batch())


def step_rows(models: Sequence[str], precisions: Sequence[Precision], device: str, limits: Limits) -> Iterator[Any]:
    """Yield a row of the table of whole steps for each model and precision."""
    for name in models:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / "model"
            write_model(folder, SHAPES[name])
            for precision in precisions:
                yield name, precision, *step_figures(Path(made), name, precision, device, limits)


def step_figures(folder: Path, name: str, precision: Precision, device: str, limits: Limits) -> Sequence[str]:
    letters = random.Random(0)
    prompts = ["".join(letters.choices("abcdefgh", k=PROMPT)) for _ in range(32)]
    tasks = [Task(str(n), (Message.user(text),)) for n, text in enumerate(prompts)]
    run, times, plans = folder / f"run-{precision}", list[float](), list[MemoryPlan]()

    def plan_and_keep(*arguments: Any) -> MemoryPlan:
        plans.append(plan_memory(*arguments))
        return plans[-1]

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # the run sets its own precision
    with products_in("float32", device), patch.object(build, "plan_memory", plan_and_keep):
        agent_r1.train(
            Dialogue("y" * 64, 2), tasks, model=str(folder / "model"), algorithm="grpo", rewards=[random_reward],
            callbacks=[lambda _: times.append(time.perf_counter())], progress=SilentProgress(), run=str(run), steps=4,
            groups_per_step=8, group_size=8, max_tokens=64, context=512, device=device, tf32=precision == "tf32",
            trainer={"learning_rate": 1e-6, "dtype": dtype_of(precision)}, engine={"dtype": dtype_of(precision)},
            evaluate_n=1, checkpoint_every=0, profile=4,
        )  # fmt: skip
    with contextlib.closing(RunReader(run)) as reader:
        mean = mean_profile({metric: reader.curve(metric) for metric in reader.metric_names()}, first_step=2)
        tokens = statistics.mean(reader.curve("model_tokens").values())
        gap = max(reader.curve("logprob_gap").values())
    learning = sum(mean[SECONDS + part] for part in ("forward", "backward"))
    shape = SHAPES[name]
    head_size = shape.width // shape.heads
    layer = shape.width * (2 * shape.width + 2 * shape.kv_heads * head_size + 3 * shape.inner)
    used = 6 * (shape.layers * layer * tokens) / learning / limits.products[precision]
    peak = f"{torch.cuda.max_memory_allocated() / GIB:.1f}" if device == "cuda" else ""
    parts = ("prefill", "generation", "sampling", "forward", "backward", "optimizer", "publish")
    seconds = [mean.get(SECONDS + part, 0.0) for part in parts]
    whole = (times[-1] - times[0]) / (len(times) - 1)
    figures = (f"{whole:.2f}", *(f"{one:.2f}" for one in seconds), f"{tokens:,.0f}", f"{used:.2f}", f"{gap:.1e}")
    return (*figures, peak, f"{plans[0].total / GIB:.1f}")


def show(title: str, headers: Sequence[str], rows: Iterator[Any]) -> None:
    """Print each row when it is measured, so that a later failure loses nothing."""
    print(f"\n{title}\n" + " | ".join(headers), flush=True)
    try:
        for row in rows:
            print(" | ".join(row), flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    except (RuntimeError, agent_r1.AgentR1Error) as error:  # the next section can still be measured
        print(f"{type(error).__name__}: {str(error)[:2000]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--models", nargs="+", default=["135M", "0.5B", "1.5B"], choices=SHAPES)
    parser.add_argument("--precisions", nargs="+", default=list(get_args(Precision)), choices=get_args(Precision))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to see that the script runs")
    options = parser.parse_args()
    options.sections = options.sections or SECTIONS
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]}: give some of {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine")
    given = (options.models, options.precisions, options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "a CPU"
    limits = measure_limits(options.precisions, options.device, 8192 if options.device == "cuda" else 512)
    tera = {precision: f"{rate / 1e12:.1f}" for precision, rate in limits.products.items()}
    print(f"{name}, torch {torch.__version__}; TFLOP/s {tera}; copies {limits.copies / 1e9:,.0f} GB/s", flush=True)
    if "decode" in options.sections:
        headers = ("model", "precision", "ms", "floor ms", "ratio", "ms, prefill of 64 x 128 tokens")
        show("decode step of 64 sequences", headers, decode_rows(*given, limits))
    if "rollout" in options.sections:
        headers = ("model", "precision", "generate", "embedded engine", "ratio")
        show("rollout, tokens/s", headers, rollout_rows(*given))
    if "step" in options.sections:
        parts = ("prefill", "generation", "sampling", "forward", "backward", "optimizer", "publish")
        headers = ("model", "precision", "step s", *parts, "model tokens", "used", "gap", "peak GiB", "estimated GiB")
        show("GRPO step", headers, step_rows(*given, limits))


if __name__ == "__main__":
    main()
