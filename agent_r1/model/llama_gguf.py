"""Convert a Llama model from a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from agent_r1.core.errors import import_extra

GGUF_EXTRA = "smollm2"
"""The extra of agent-r1 that installs the package ``gguf``."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of a Llama model's tensors: the keys are names in GGUF files, the values are names in transformers.

All names are without a layer index and without the ending ``.weight``.
"""

_SUPPORTED = {
    "general.architecture": ("llama",),
    "llama.rope.scaling.type": (None, "none"),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("gpt-2", "smollm"),
    "tokenizer.ggml.add_bos_token": (None, False),
}
"""Metadata values of a GGUF file that this module can convert. None stands for a missing entry."""

Metadata = Mapping[str, Any]


def convert_llama(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into ``folder``: configuration, tokenizer, chat template, and float32 weights.

    Raises:
        InvalidInput: the package ``gguf`` is not installed.
        ValueError: the file is not a GGUF file, or holds a model that this module cannot convert.
    """
    gguf = import_extra("gguf", GGUF_EXTRA)
    reader = gguf.GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for name, supported in _SUPPORTED.items():
        if metadata.get(name) not in supported:
            raise ValueError(f"{name} is {metadata.get(name)!r}, not {' or '.join(map(repr, supported))}")
    config = _config(metadata, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[_name(tensor.name)] = _in_halves(values, tensor.name, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    ends = {name: config.to_dict()[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ends).save_pretrained(folder)
    _tokenizer(metadata, gguf.TokenType).save_pretrained(folder)


def _config(metadata: Metadata, tied: bool) -> LlamaConfig:
    width, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    tokens: dict[str, Any] = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=width,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=metadata.get("llama.attention.key_length", width // heads),
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings=tied,
        dtype="float32",
        **tokens,
    )


def _name(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in _NAMES:
        raise ValueError(f"{name} is not a tensor of a Llama model")
    return f"{f'model.layers.{match[1]}.' if match[1] else ''}{_NAMES[match[2]]}.weight"


def _in_halves(values: np.ndarray, name: str, config: LlamaConfig) -> np.ndarray:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    pairs = values.reshape(heads, -1, 2, values.shape[1])  # (heads, head_dim / 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _tokenizer(metadata: Metadata, token_type: Any) -> PreTrainedTokenizerFast:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata["tokenizer.ggml.pre"])
    tokenizer.decoder = ByteLevelDecoder()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == token_type.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == token_type.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    named = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["llama.context_length"],
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _pre_tokenizer(name: str) -> PreTokenizer:
    byte_level = ByteLevel(add_prefix_space=False)
    return Sequence([Digits(individual_digits=True), byte_level]) if name == "smollm" else byte_level
