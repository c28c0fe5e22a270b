"""Tiny vision models: architecture, random weights, chat template, image processor.

Three kinds: Qwen2.5-VL and Qwen3-VL (one grid of features, positions in three rows) and SmolVLM (tiles, ordinary
positions).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

Kind = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm"]

PATCH = 8
"""The side of a patch of an image, in pixels. 2 x 2 patches become one feature."""

TILE = 32
"""The side of a tile of SmolVLM, in pixels."""

_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_TILE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>")
_GRID = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))

_CONTENT = """\
{%- macro show(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}
        {%- for part in content %}{{ PLACEHOLDER if part.type == 'image' else part.text }}{% endfor %}
    {%- endif %}
{%- endmacro %}
"""
_MESSAGES = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + show(message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def with_vision_tokens(tokenizer: PreTrainedTokenizerBase, kind: Kind) -> PreTrainedTokenizerBase:
    """Add the special tokens of a kind of vision model to a tokenizer, and give it a chat template with images."""
    grid = kind == "smolvlm"
    tokenizer.add_special_tokens({"additional_special_tokens": [*(_TILE_TOKENS if grid else _QWEN_TOKENS)]})
    if grid:
        tokenizer.add_tokens([*_GRID])
    placeholder = "'<image>'" if grid else "'<|vision_start|><|image_pad|><|vision_end|>'"
    tokenizer.chat_template = _CONTENT.replace("PLACEHOLDER", placeholder) + _MESSAGES
    return tokenizer


def make_vision_model(kind: Kind, tokenizer: PreTrainedTokenizerBase, seed: int, width: int = 32) -> PreTrainedModel:
    """Return a model with random weights that depend on the seed only. ``width`` is the hidden size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(_config(kind, tokenizer, width)).eval()


def save_vision_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model, tokenizer and image processor to ``folder``, which ``train(model=..)`` takes."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(model.config.model_type).save_pretrained(folder)


def _config(kind: Kind, tokenizer: PreTrainedTokenizerBase, width: int) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*_QWEN_TOKENS, *_TILE_TOKENS)}
    text: dict[str, Any] = {
        "vocab_size": 8 * math.ceil(len(tokenizer) / 8),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "smolvlm":
        vision = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1, "image_size": TILE}
        return SmolVLMConfig(
            text_config={"model_type": "llama", **text, "head_dim": width // 2},
            vision_config={**vision, "num_attention_heads": 2, "patch_size": PATCH},
            image_token_id=ids["<image>"],
            scale_factor=2,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    vision = {"depth": 2, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2}
    vision |= {"out_hidden_size": width, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 1}
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }
    half = width // 4  # of the size of a head: 2 heads
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * (half // 3), *[half // 3] * 2]}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **tokens)
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text |= {"head_dim": width // 2, "rope_parameters": {**rope, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def _image_processor(model_type: str) -> Any:
    if model_type == "smolvlm":
        size = {"longest_edge": 2 * TILE}
        return SmolVLMImageProcessorPil(size=size, max_image_size={"longest_edge": TILE}, do_image_splitting=True)
    side = 2 * PATCH
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=2, temporal_patch_size=1, min_pixels=side**2, max_pixels=(16 * PATCH) ** 2
    )
