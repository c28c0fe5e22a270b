"""What a model is beside its weights, as digests: whether a checkpoint belongs to the model that wants to go on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agent_r1.store.manifest import Identity

PASSING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of a model's configuration that say where it came from, not what it computes."""

BATCHING = {"padding", "truncation"}
"""Entries of a tokenizer that its last call may have set."""


def identity_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights: str) -> Identity:
    """The identity of a model whose weights have the digest ``weights``."""
    return Identity(_digest(_shape(model)), _digest(_words(tokenizer)), _digest(tokenizer.chat_template), weights)


def _shape(model: PreTrainedModel) -> dict[str, Any]:
    """How the model computes: its configuration, and the names, shapes and types of its parameters."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in PASSING}
    return config | {name: [str(p.dtype), *p.shape] for name, p in model.named_parameters()}


def _words(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """How the tokenizer splits text; of one without a file of its own, its vocabulary."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.get_vocab()
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in saved.items() if key not in BATCHING}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
