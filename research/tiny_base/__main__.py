"""Make tiny-base: ``python -m research.tiny_base [FOLDER] [--seed SEED]``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from research.tiny_base.pretrain import (
    LEARNING_RATE,
    PHASES,
    Progress,
    make_initial_model,
    make_initial_tokenizer,
    pretrain,
)

_PRINT_EVERY = 50


def main() -> None:
    """Pretrain tiny-base and save its weights (safetensors), its tokenizer with the chat template, and its recipe."""
    parser = argparse.ArgumentParser(prog="python -m research.tiny_base", description=main.__doc__)
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=TINY_BASE_FOLDER,
        help="the folder to write; by default the committed one",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of weights and examples; the committed model has 0"
    )
    given = parser.parse_args()
    folder, seed = given.folder, given.seed
    torch.set_num_threads(1)
    tokenizer = make_initial_tokenizer()
    model = make_initial_model(tokenizer, seed)
    for progress in pretrain(model, tokenizer, seed):
        if progress.step % _PRINT_EVERY == 0:
            print(_progress_line(progress), file=sys.stderr, flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe = {
        "seed": seed,
        "learning_rate": LEARNING_RATE,
        "phases": [asdict(phase) for phase in PHASES],
        "parameters": model.num_parameters(),
        "loss": progress.loss,
        "accuracy": progress.accuracy,
    }
    (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", "utf-8")


def _progress_line(progress: Progress) -> str:
    return f"step {progress.step:4}  loss {progress.loss:.3f}  accuracy {progress.accuracy:.3f}"


if __name__ == "__main__":
    main()
