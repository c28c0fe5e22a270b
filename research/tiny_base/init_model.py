"""tiny-base before its first step: vocabulary, architecture, initial weights."""

from __future__ import annotations

import math
import random

import torch
from transformers import PreTrainedTokenizerBase, SeedOssConfig, SeedOssForCausalLM

from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.wiki import CLASSES, ENTITIES, RELATIONS, draw
from research.tiny_base import planner
from research.tiny_base.examples import TOOLS
from research.tiny_base.tokenizer import make_tokenizer

_SAMPLES = 100
"""Enough conversations to contain every piece of text that occurs in any conversation."""


def make_initial_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer with the vocabulary of TinyWiki's conversations."""
    rng = random.Random(0)
    renderer = TemplateRenderer(make_tokenizer([]))
    texts = [*ENTITIES, *RELATIONS]
    for _ in range(_SAMPLES):
        wiki = draw(CLASSES["train"], rng)
        texts.append(renderer.render_text(planner.transcript(wiki, rng), TOOLS))
        texts.append(renderer.render_text(planner.reading(wiki, rng), ()))
    return make_tokenizer(texts)


def make_initial_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> SeedOssForCausalLM:
    """Return a model of 0.2 million parameters with Qwen2's layers; its random weights depend on the seed only.

    It has the model type of Seed-OSS, whose layers are the same: for every model of type qwen2, transformers replaces
    the saved tokenizer by Qwen2's own.
    """
    config = SeedOssConfig(
        vocab_size=8 * math.ceil(len(tokenizer) / 8),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_dropout=0.0,
        residual_dropout=0.0,
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SeedOssForCausalLM(config)
    _attend_to_previous(model)
    return model


def _attend_to_previous(model: SeedOssForCausalLM, strength: float = 6.0, planes: int = 3) -> None:
    """Make the first head of the first layer attend to the previous token, whatever the tokens are.

    Copying needs such a head and a second one that uses it (induction: Olsson et al. 2022, arXiv 2209.11895);
    a small model needs thousands of steps to find the first and a few hundred to find the second. Query and key biases
    are sufficient: rotary positions rotate plane i by the i-th frequency per token, so a query bias that is the key
    bias rotated by one token has its best match one token back.
    """
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    frequencies = model.model.rotary_emb.inv_freq[:planes]
    with torch.no_grad():
        attention.k_proj.bias[:planes] = strength
        attention.q_proj.bias[:planes] = strength * frequencies.cos()
        attention.q_proj.bias[half : half + planes] = -strength * frequencies.sin()
