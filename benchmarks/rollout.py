"""Measure rollout alone: tokens per CPU second of the embedded engine, transformers.generate and vLLM.

    python benchmarks/rollout.py 1M 14M --vllm .venv/vllm/bin/python

Llama models with random weights sample from groups of equal prompts, one action per attempt, at temperature 1 and to
the last token. Each engine is a process of its own with one thread. A first batch is left out; the table has medians
over the further batches, each with new prompts. The embedded engine and vLLM also return log-probabilities. Without
``--vllm`` there is no row of vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peers import SHAPES, write_model
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

from agent_r1.core.inference import Prompt, SamplingParams
from agent_r1.inference.torch_engine import TorchEngine

VLLM_WORKER = Path(__file__).parent / "other_environments" / "rollout_vllm.py"
ENGINES = ("transformers.generate", "embedded engine")


def write_work(folder: Path, name: str, options: argparse.Namespace) -> None:
    """Write a model and ``work.json``, the prompts of all batches, to ``folder``."""
    write_model(folder, SHAPES[name])
    drawn = random.Random(0)
    batches = [
        [drawn.choices(range(256), k=options.prompt) for _ in range(options.groups)] * options.group_size
        for _ in range(options.batches)
    ]
    (folder / "work.json").write_text(json.dumps({"batches": batches, "action": options.action}))


def generate_with_transformers(folder: Path, action: int) -> Callable[[Sequence[Sequence[int]]], int]:
    """Return a function that samples for prompts with transformers, and returns the number of tokens."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def sample(prompts: Sequence[Sequence[int]]) -> int:
        ids = torch.tensor(prompts)
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": action, "min_new_tokens": action, "pad_token_id": 0}
        return int(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].numel())

    return sample


def generate_with_ours(folder: Path, action: int) -> Callable[[Sequence[Sequence[int]]], int]:
    """Return a function that samples for prompts with the embedded engine, and returns the number of tokens."""
    length = len(json.loads((folder / "work.json").read_text())["batches"][0][0])
    engine = TorchEngine(LlamaForCausalLM.from_pretrained(folder).eval(), length + action)

    def sample(prompts: Sequence[Sequence[int]]) -> int:
        async def batch() -> int:
            requests = (
                engine.generate(Prompt(tuple(prompt)), SamplingParams(max_tokens=action, seed=seed))
                for seed, prompt in enumerate(prompts)
            )
            return sum(len(completion.token_ids) for completion in await asyncio.gather(*requests))

        return asyncio.run(batch())

    return sample


def work(engine: str, folder: Path) -> float:
    """Return the median of tokens per CPU second over the batches in ``folder``, without the first batch."""
    torch.set_num_threads(1)
    given = json.loads((folder / "work.json").read_text())
    make = generate_with_transformers if engine == ENGINES[0] else generate_with_ours
    sample = make(folder, given["action"])
    rates = []
    for batch in given["batches"]:
        start = time.process_time()
        rates.append(sample(batch) / (time.process_time() - start))
    return statistics.median(rates[1:])


def run_worker(command: Sequence[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["1M", "14M"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--batches", type=int, default=4, help="batches of each engine, of which the first is left out")
    parser.add_argument("--groups", type=int, default=4, help="different prompts of a batch")
    parser.add_argument("--group_size", type=int, default=8, help="attempts at each prompt")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--action", type=int, default=64, help="tokens of an action")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(work(options.worker[0], Path(options.worker[1])))
        return
    names = (*ENGINES, *(["vLLM"] if options.vllm else []))
    table = Table("tokens per CPU second", *names, "ours / generate", *(["ours / vLLM"] if options.vllm else []))
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as made:
            write_work(Path(made), size, options)
            rates = [run_worker([sys.executable, __file__, "--worker", engine, made]) for engine in ENGINES]
            if options.vllm:
                rates.append(run_worker([str(options.vllm), str(VLLM_WORKER), made]))
        ratios = [f"{rates[1] / other:.1f}" for other in (rates[0], *rates[2:])]
        table.add_row(size, *(f"{rate:,.0f}" for rate in rates), *ratios)
    Console(width=120).print(table)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
