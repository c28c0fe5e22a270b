"""Torch models: loading, token log-probabilities, LoRA adapters, value heads, sentence encoders, checksums of weights.

Public names are imported at their first use, so that ``agent_r1.model.config`` does not import torch.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.model.adapter import add_adapter, merged_copy, without_adapter
    from agent_r1.model.config import LoraConfig
    from agent_r1.model.encoder import SentenceEncoder, load_encoder
    from agent_r1.model.forward import hidden_states, token_logprobs, token_scores
    from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer
    from agent_r1.model.value_head import ValueModel, build_value_model, load_value_model, save_value_model
    from agent_r1.model.weights import weights_checksum

__all__ = [
    "LoraConfig",
    "SentenceEncoder",
    "ValueModel",
    "add_adapter",
    "build_value_model",
    "hidden_states",
    "load_encoder",
    "load_model",
    "load_stop_ids",
    "load_tokenizer",
    "load_value_model",
    "merged_copy",
    "save_value_model",
    "token_logprobs",
    "token_scores",
    "weights_checksum",
    "without_adapter",
]

__getattr__ = lazy_names(
    __name__,
    {
        "adapter": ("add_adapter", "merged_copy", "without_adapter"),
        "weights": ("weights_checksum",),
        "config": ("LoraConfig",),
        "encoder": ("SentenceEncoder", "load_encoder"),
        "forward": ("hidden_states", "token_logprobs", "token_scores"),
        "load": ("load_model", "load_stop_ids", "load_tokenizer"),
        "value_head": ("ValueModel", "build_value_model", "load_value_model", "save_value_model"),
    },
)
