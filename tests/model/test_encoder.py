"""Sentence encoders: pooling, length, padding, and the errors for broken folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_tokenizer import hermes_tokenizer
from transformers import BertConfig, BertModel

from agent_r1.core.errors import InvalidInput
from agent_r1.model.encoder import POOLING_FILE, SentenceEncoder, load_encoder

TEXTS = ["a", "some more words", "", "x" * 300, "some more words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = hermes_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=0.5, **small)
    BertModel(config).save_pretrained(folder)
    return folder


def load(folder: Path, pooling: str = "auto", batch: int = 64) -> SentenceEncoder:
    return load_encoder(str(folder), pooling, 512, batch, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_vector_is_the_pooled_hidden_state_of_length_one(pooling: str, folder: Path) -> None:
    encoder = load(folder, pooling)
    vectors = encoder.encode(TEXTS[:2])
    for text, vector in zip(TEXTS, vectors, strict=False):
        ids = encoder.tokenizer(text, return_tensors="pt")["input_ids"]
        hidden = encoder.model(input_ids=ids).last_hidden_state[0].detach().numpy()
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        np.testing.assert_allclose(vector, pooled / np.linalg.norm(pooled), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_other_texts_and_their_order_do_not_change_a_vector(pooling: str, folder: Path) -> None:
    together = load(folder, pooling).encode(TEXTS)
    assert together.shape == (5, 16) and together.dtype == np.float32
    for batch in (1, 2):
        np.testing.assert_allclose(load(folder, pooling, batch).encode(TEXTS), together, atol=1e-5)
    np.testing.assert_allclose(together[1], together[4], atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.05


def test_a_long_text_is_truncated_to_the_context_of_the_model(folder: Path) -> None:
    encoder = load(folder)
    assert encoder.max_tokens == 128
    np.testing.assert_allclose(*encoder.encode(["x" * 300, "x" * 128]), atol=1e-5)


def test_the_pooling_that_a_folder_declares_is_used(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / POOLING_FILE).parent.mkdir()
    (copy / POOLING_FILE).write_text(
        json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}), "utf-8"
    )
    assert (load(folder).pooling, load(copy).pooling) == ("mean", "cls")
    with pytest.raises(InvalidInput, match=r"pooling: got 'mean'.*use 'cls'"):
        load(copy, "mean")
    (copy / POOLING_FILE).write_text(json.dumps({"pooling_mode_lasttoken": True}), "utf-8")
    with pytest.raises(InvalidInput, match="pools in another way"):
        load(copy)


def test_a_folder_without_an_encoder_is_an_error_of_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="encoder: got"):
        load(tmp_path / "nothing")
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InvalidInput, match="name a complete encoder model") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
