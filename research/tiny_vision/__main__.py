"""Make a tiny vision model for the task set shapes: ``python -m research.tiny_vision FOLDER [--kind smolvlm]``."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from agent_r1.model.load import load_images, load_tokenizer
from agent_r1.renderers.byte_tokenizer import OneTokenImages, byte_tokenizer
from agent_r1.renderers.template_renderer import TemplateRenderer
from environments import shapes
from research.tiny_base.tokenizer import make_tokenizer
from research.tiny_vision.models import (
    PHASES,
    TOOLS,
    Kind,
    Phase,
    make_vision_model,
    plan,
    pretrain,
    save_vision_model,
    show,
    with_vision_tokens,
)

WIDTH = 64
_PRINT_EVERY = 20


def make(
    folder: Path, kind: Kind = "qwen2_5_vl", seed: int = 0, phases: Sequence[Phase] = PHASES, width: int = WIDTH
) -> float:
    """Write a pretrained model with tokenizer and image processor to ``folder``. Return the loss of the last step."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    plain = TemplateRenderer(byte_tokenizer(images=True), images=OneTokenImages())
    tasks = shapes.tasks("train", 1000 + seed)[:60]
    conversations = [one for task in tasks for one in (plan(task, rng), show(task, rng, with_picture=True))]
    words = " ".join([*shapes.COLORS, *shapes.SHAPES, *shapes.PLACES, "90 180 270"])
    texts = [words, *(plain.render_text(one, TOOLS) for one in conversations)]
    tokenizer = with_vision_tokens(make_tokenizer(texts), kind)
    model = make_vision_model(kind, tokenizer, seed, width)
    save_vision_model(model, tokenizer, folder)
    tokenizer = load_tokenizer(str(folder))
    images = load_images(str(folder), tokenizer)
    assert images is not None
    loss = 0.0
    renderer = TemplateRenderer(tokenizer, images=images)
    steps = sum(phase.steps for phase in phases)
    for step, loss in enumerate(pretrain(model, images, renderer, seed, phases)):
        if step % _PRINT_EVERY == 0 or step + 1 == steps:
            print(f"step {step:4}  loss {loss:.3f}", file=sys.stderr, flush=True)
    save_vision_model(model, tokenizer, folder)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.tiny_vision", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--kind", choices=get_args(Kind), default="qwen2_5_vl", help="the architecture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the steps of pretraining")
    arguments = parser.parse_args()
    phases = [replace(phase, steps=round(arguments.scale * phase.steps)) for phase in PHASES]
    make(arguments.folder, arguments.kind, arguments.seed, phases)


if __name__ == "__main__":
    main()
