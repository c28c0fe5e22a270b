"""A tiny random Qwen2 and what the tests of engines share."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 50


@pytest.fixture(scope="session")
def tiny_model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()
