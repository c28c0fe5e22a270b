"""Compare loss and gradient of supervised fine-tuning with TRL's SFTTrainer, on the same transcripts.

    make bench-peers                             # installs TRL into .venv/peers first
    .venv/bin/python benchmarks/peers_sft.py     # three chat templates of TRL, with and without packing

Models with random weights read 200 transcripts (16 with packing, for which TRL needs a dense mask on a CPU). TRL's
training templates for Qwen also train the line breaks before and after a message, which no policy samples: they are
left out. The process in the environment of TRL runs this file, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PEERS_PYTHON = Path(".venv/peers/bin/python")
TEMPLATES = ("qwen2_5", "qwen3", "llama3")
TOOL = {"name": "calc", "description": "Compute.", "parameters": {"type": "object", "properties": {}}}


def write_inputs(folder: Path, template: str, rows: int) -> None:
    """Write a random model whose tokens are bytes and the special tokens of a template, and ``rows`` transcripts."""
    (source,) = PEERS_PYTHON.parents[1].glob(f"lib/*/site-packages/trl/chat_templates/{template}.jinja")
    text = source.read_text("utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    end = "<|im_end|>" if template != "llama3" else "<|eot_id|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token=end, pad_token="<|pad|>", bos_token="<|bos|>")
    fast.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<\|\w+\|>", text)) - {end})})
    fast.chat_template = text
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), max_position_embeddings=8192, **sizes)).save_pretrained(folder)
    fast.save_pretrained(folder)
    numbers = random.Random(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(rows):
            a, b = numbers.randint(1, 999), numbers.randint(1, 999)
            question = {"role": "user", "content": f"What is {a} times {b}?"}
            answer = {"role": "assistant", "content": f"It is {a * b}."}
            thought = {"reasoning_content": "I calculate."} if template == "qwen3" else {}
            call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": {"x": f"{a}*{b}"}}}
            result = {"role": "tool", "tool_call_id": "c", "name": "calc", "content": str(a * b)}
            calling = [{"role": "assistant", "content": "", "tool_calls": [call], **thought}, result]
            tools = [{"type": "function", "function": TOOL}]
            row = {"messages": [question, *calling, answer | thought], "tools": tools}
            if template == "llama3":  # writes no tools
                row = {"messages": [question, answer, {"role": "user", "content": "Sure?"}, answer]}
            file.write(json.dumps(row) + "\n")


def train_ours(folder: Path) -> dict[str, Any]:
    """Return loss, number of trained tokens, and gradient of a step on all transcripts."""
    from agent_r1.config import Layer
    from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
    from agent_r1.tasksets.transcripts import make_taskset, read_transcripts
    from agent_r1.training.build import build_runtime
    from agent_r1.training.config import TrainConfig, resolve_config
    from agent_r1.training.environments import make_rollout
    from agent_r1.training.sft import sft_layers

    taskset, found = make_taskset(read_transcripts(folder / "rows.jsonl")), dict[str, Any]()
    layers = sft_layers([Layer("benchmark", {"model": str(folder), "run": str(folder / "run")})], taskset, 1)
    runtime = build_runtime(resolve_config(TrainConfig, layers, taskset), taskset)

    async def update() -> None:
        rollout = make_rollout(runtime.agent, taskset.env)
        collector = Collector(rollout, taskset.scorers, NullRecorder(), "run", RolloutLimits())
        requests = (GroupRequest(number, task, 1) for number, task in enumerate(taskset.tasks("train")))
        groups = [runtime.updater.select(group) async for group in collector.collect(requests)]
        metrics = (await runtime.updater.update(groups)).metrics
        found.update(loss=metrics["sft_loss"], tokens=int(metrics["action_tokens"]))

    optim_step = runtime.trainer.optim_step

    def keep_gradients(factor: float = 1.0) -> Any:
        parameters = runtime.policy.model.named_parameters()
        found["gradient"] = {name: one.grad.clone() for name, one in parameters if one.grad is not None}
        return optim_step(factor)

    runtime.trainer.optim_step = keep_gradients  # type: ignore[method-assign]
    asyncio.run(update())
    return found


def train_trl(folder: Path, packing: bool) -> None:
    """Write what :func:`train_ours` returns, from TRL, to ``folder``. Runs in the environment of TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, per_device_train_batch_size=len(rows), max_steps=1,
        assistant_only_loss=True, packing=packing, max_length=4096, gradient_checkpointing=False, report_to="none",
        loss_type="nll",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    (line_break,) = tokenizer.encode("\n", add_special_tokens=False)
    for labels in batch["labels"]:  # each run of trained tokens, without line breaks at its ends
        trained = labels != -100
        for step in (1, -1):
            order = range(len(labels))[::step]
            before = [False, *(bool(trained[place]) for place in order)]
            for place, inside in zip(order, before, strict=False):
                if trained[place] and not inside and labels[place] == line_break:
                    labels[place] = -100
    tokens = (batch["labels"][:, 1:] != -100).sum()
    loss = trainer.compute_loss(model, batch, num_items_in_batch=tokens)
    loss.backward()
    gradient = {name: one.grad for name, one in model.named_parameters()}
    torch.save({"loss": float(loss), "tokens": int(tokens), "gradient": gradient}, folder / "trl.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trl", nargs="*", help=argparse.SUPPRESS)  # of the process with TRL: folder, padding or packing
    if of_trl := parser.parse_args().trl:
        train_trl(Path(of_trl[0]), of_trl[1] == "packing")
        return
    if not PEERS_PYTHON.exists():
        sys.exit(f"{PEERS_PYTHON} does not exist: run 'make bench-peers', which installs TRL")
    for template in TEMPLATES:
        for packing, rows in (("padding", 200), ("packing", 16)):
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                write_inputs(folder, template, rows)
                subprocess.run([str(PEERS_PYTHON), __file__, made, packing], check=True, capture_output=True)
                ours, trl = train_ours(folder), torch.load(folder / "trl.pt")
            largest = max(float(one.abs().max()) for one in trl["gradient"].values())
            differences = [float((ours["gradient"][name] - one).abs().max()) for name, one in trl["gradient"].items()]
            loss, gradient = abs(ours["loss"] - trl["loss"]), max(differences)
            print(f"{template}, {rows} transcripts, {packing}: {ours['tokens']} and {trl['tokens']} tokens, losses")
            print(f"differ by {loss:.1e}, gradients by {gradient:.1e} of at most {largest:.2f}")


if __name__ == "__main__":
    main()
