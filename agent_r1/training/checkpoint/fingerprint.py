"""The fingerprint of a model, which shows whether a checkpoint was saved for this model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agent_r1.store.manifest import ModelFingerprint

_IGNORED_CONFIG = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of a model's configuration that do not change its outputs."""

_IGNORED_TOKENIZER = {"padding", "truncation"}
"""Entries of tokenizer.json that a call of the tokenizer can change."""


def fingerprint_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, weights_checksum: str
) -> ModelFingerprint:
    """Return the hashes that identify a model: its configuration, tokenizer, chat template and weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _IGNORED_CONFIG}
    shapes = {name: [str(p.dtype), *p.shape] for name, p in model.named_parameters()}
    return ModelFingerprint(
        model=_hash_json(config | shapes),
        tokenizer=_hash_json(_tokenizer_content(tokenizer)),
        template=_hash_json(tokenizer.chat_template),
        weights=weights_checksum,
    )


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer.get_vocab()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in content.items() if key not in _IGNORED_TOKENIZER}


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
