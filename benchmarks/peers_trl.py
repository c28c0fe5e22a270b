"""Train with TRL's GRPOTrainer on the workload of benchmarks/peers.py, and print its measures as JSON.

    .venv/peers/bin/python benchmarks/peers_trl.py FOLDER

Only peers.py runs this script. It runs in an environment of its own, without Agent-R1. FOLDER has the model, and
``workload.json``. The turns are those that TRL's documentation describes for a ``rollout_func``: the trainer generates
an action, the observation follows, and so on. ``env_mask`` excludes observations from the loss.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Wall and CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


class Rollouts:
    """The rollouts of the workload, with the trainer's own generation, and the numbers of their tokens."""

    def __init__(self, workload: dict[str, Any], tokenizer: Any) -> None:
        self._turns = workload["turns"]
        self._observation = tokenizer.encode(workload["after_action"], add_special_tokens=False)
        self._tokenizer = tokenizer
        self.prompt_tokens = self.action_tokens = self.observation_tokens = 0

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        encoded = self._tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        for turn in range(self._turns):
            if turn:
                for completion, mask in zip(completions, masks, strict=True):
                    completion += self._observation
                    mask += [0] * len(self._observation)
            contexts = [prompt + completion for prompt, completion in zip(encoded, completions, strict=True)]
            actions, _ = trainer._generate_single_turn(contexts, None, {}, trainer.num_generations)
            for completion, mask, action in zip(completions, masks, actions, strict=True):
                completion += action
                mask += [1] * len(action)
        self.prompt_tokens += sum(map(len, encoded))
        self.action_tokens += sum(map(sum, masks))
        self.observation_tokens += sum(len(mask) - sum(mask) for mask in masks)
        return {"prompt_ids": encoded, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def random_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return a pseudo-random reward for each attempt, so that every group has a training signal."""
    return [random.Random(completion[0]["content"]).random() for completion in completions]


def main() -> None:
    folder = Path(sys.argv[1])
    workload = json.loads((folder / "workload.json").read_text("utf-8"))
    torch.set_num_threads(workload["threads"])
    transformers.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rollouts, times = Rollouts(workload, tokenizer), StepTimes()
    attempts, batch = workload["groups"] * workload["group_size"], workload["trl_batch"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=workload["dtype"] == "bfloat16",  # autocast; the weights are in float32
        gradient_checkpointing=False,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=attempts // batch,
        steps_per_generation=attempts // batch,
        num_generations=workload["group_size"],
        max_completion_length=workload["action"],
        max_steps=workload["steps"],
        learning_rate=workload["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        temperature=1.0,
        top_k=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False),
        reward_funcs=random_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in workload["prompts"]]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[times],
    )
    trainer.train()
    steps = workload["steps"]
    measures = {
        "wall": times.wall,
        "cpu": times.cpu,
        "prompt_tokens": rollouts.prompt_tokens / steps,
        "action_tokens": rollouts.action_tokens / steps,
        "observation_tokens": rollouts.observation_tokens / steps,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(measures))


if __name__ == "__main__":
    main()
