"""Show which settings repeat a run bit for bit: train twice with each setting, and compare the digests of the runs.

    python benchmarks/repeats.py

A random Llama model takes three steps of GRPO on two groups of four attempts. In both runs, the environment answers
after random times, so that the attempts meet in other batches and finish in another order. The digest of a run covers
tokens, log-probabilities, rewards, metrics and weights.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from peers import SHAPES, Dialogue, DialogueEpisode, random_reward, write_model
from rich.console import Console
from rich.table import Table

import agent_r1
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import run_digest
from agent_r1.training.progress import SilentProgress

DELAY = 0.05
"""The largest delay of an answer, in seconds."""

SETTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "defaults: native step, shared prefixes": ("0.5M", {}),
    "--engine.decode_step torch": ("0.5M", {"engine": {"decode_step": "torch"}}),
    "--trainer.share_prefixes off": ("0.5M", {"trainer": {"share_prefixes": "off"}}),
    "--trainer.micro_tokens 512": ("0.5M", {"trainer": {"micro_tokens": 512}}),
    "--threads 2": ("0.5M", {"threads": 2}),
    "--trainer.dtype bfloat16 --engine.dtype bfloat16": (
        "0.5M",
        {"trainer": {"dtype": "bfloat16"}, "engine": {"dtype": "bfloat16"}},
    ),
    "--trainer.lora.rank 4": ("0.5M", {"trainer": {"lora": {"rank": 4}}}),
    "--trainer.activation_checkpointing true": ("0.5M", {"trainer": {"activation_checkpointing": True}}),
    "--max_staleness 1": ("0.5M", {"max_staleness": 1}),
    "14 million parameters: native step": ("14M", {}),
    "14 million parameters: running rows in PyTorch": ("14M", {"engine": {"decode_step": "torch"}}),
}
"""The model and the settings of each row."""


class LateDialogue(Dialogue):
    """The dialogue, with answers after random times."""

    async def open(self, task: Task, context: RolloutContext) -> LateEpisode:
        return LateEpisode(self, task.messages)


class LateEpisode(DialogueEpisode):
    """An episode that answers after random times, which no seed determines."""

    async def step(self, action: Action) -> Transition:
        await asyncio.sleep(DELAY * random.SystemRandom().random())
        return await super().step(action)


def digest_of(model: Path, settings: Mapping[str, Any]) -> str:
    """Train in a new folder, and return the digest of the run."""
    letters = random.Random(0)
    tasks = [Task(str(n), (Message.user("".join(letters.choices(string.ascii_lowercase, k=100))),)) for n in range(6)]
    trainer = {"learning_rate": 1e-3, **settings.get("trainer", {})}
    with tempfile.TemporaryDirectory() as made:
        agent_r1.train(
            LateDialogue("observation " * 3, turns=3), tasks, model=str(model), algorithm="grpo",
            rewards=[random_reward], progress=SilentProgress(), run=f"{made}/run", steps=3, groups_per_step=2,
            group_size=4, max_tokens=16, context=512, evaluate_n=1, checkpoint_every=0,
            **{**settings, "trainer": trainer},
        )  # fmt: skip
        with closing(RunReader(Path(made) / "run")) as reader:
            return run_digest(reader)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    table = Table("settings", "two runs have equal digests", "the digest of the defaults")
    first: dict[str, str] = {}  # the digest of the first row of each model
    with tempfile.TemporaryDirectory() as made:
        for name, (size, settings) in SETTINGS.items():
            model = Path(made) / size
            if not model.exists():
                write_model(model, SHAPES[size])
            one, other = digest_of(model, settings), digest_of(model, settings)
            first.setdefault(size, one)
            table.add_row(name, "yes" if one == other else "no", "yes" if one == first[size] else "no")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
