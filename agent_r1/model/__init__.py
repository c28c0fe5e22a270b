"""Torch models: loading, token log-probabilities, value heads, sentence encoders and checksums of weights."""

from agent_r1.model.checksum import weights_checksum
from agent_r1.model.encoder import SentenceEncoder, load_encoder
from agent_r1.model.forward import hidden_states, token_logprobs, token_scores
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer
from agent_r1.model.value_head import ValueModel, build_value_model

__all__ = [
    "SentenceEncoder",
    "ValueModel",
    "build_value_model",
    "hidden_states",
    "load_encoder",
    "load_model",
    "load_stop_ids",
    "load_tokenizer",
    "token_logprobs",
    "token_scores",
    "weights_checksum",
]
