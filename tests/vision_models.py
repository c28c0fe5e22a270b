"""Tiny vision models with random weights, loaded from a folder as a run loads them, and pictures for them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image as Pillow, ImageDraw
from transformers import PreTrainedModel

from agent_r1.core.messages import Image
from agent_r1.model.load import load_images, load_model, load_tokenizer
from agent_r1.model.vision import ImageProcessor
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from agent_r1.renderers.formats.json_formats import Hermes
from agent_r1.renderers.template_renderer import TemplateRenderer
from research.tiny_vision.models import Kind, make_vision_model, save_vision_model, with_vision_tokens

KINDS: tuple[Kind, ...] = ("qwen2_5_vl", "qwen3_vl", "smolvlm")


@dataclass(frozen=True)
class VisionModel:
    """A loaded model with its image processor and its renderer."""

    model: PreTrainedModel
    images: ImageProcessor
    renderer: TemplateRenderer


def write_vision_model(kind: Kind, folder: Path) -> Path:
    tokenizer = with_vision_tokens(byte_tokenizer(), kind)
    save_vision_model(make_vision_model(kind, tokenizer, seed=0), tokenizer, folder)
    return folder


def load_vision_model(folder: Path) -> VisionModel:
    tokenizer = load_tokenizer(str(folder))
    images = load_images(str(folder), tokenizer)
    assert images is not None
    return VisionModel(
        load_model(str(folder), torch.float32), images, TemplateRenderer(tokenizer, Hermes(), images=images)
    )


def picture(color: str, width: int = 48, height: int = 32) -> Image:
    """A circle on white."""
    made = Pillow.new("RGB", (width, height), "white")
    ImageDraw.Draw(made).ellipse((4, 4, width // 2, height - 6), fill=color)
    return Image.from_pil(made)
