"""A Llama model in a GGUF file becomes a Hugging Face folder with the same probabilities and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import TEMPLATE, TOKENS, random_llama, write_gguf
from transformers import PreTrainedModel

from agent_r1.model.llama_gguf import convert_llama
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra smollm2)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    return folder


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(50)[None]).logits.log_softmax(-1)


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_do_not_change(tied: bool, folder: Path) -> None:
    model = random_llama(tied)
    write_gguf(folder / "model.gguf", model)
    convert_llama(folder / "model.gguf", folder)
    loaded = load_model(str(folder), torch.float32)
    assert torch.equal(logprobs(loaded), logprobs(model))
    assert loaded.config.tie_word_embeddings == tied and logprobs(model).std() > 1


def test_quantized_weights_are_those_that_the_file_means(folder: Path) -> None:
    model = random_llama()
    write_gguf(folder / "model.gguf", model, quantization="Q4_1")
    convert_llama(folder / "model.gguf", folder)
    loaded = load_model(str(folder), torch.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, weight in model.named_parameters():  # a block of 32 numbers is a row, so the order of rows is free
        values = weight.detach().numpy()
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if values.ndim == 2 else values
        assert torch.equal(loaded.get_parameter(name), torch.from_numpy(rounded)), name
    assert 0.01 < (logprobs(loaded) - logprobs(model)).abs().mean() < 1


def test_the_tokenizer_splits_text_as_the_file_says(folder: Path) -> None:
    write_gguf(folder / "model.gguf", random_llama())
    convert_llama(folder / "model.gguf", folder)
    tokenizer = load_tokenizer(str(folder))
    # With GPT-2's pattern alone, the second line break would belong to the digits.
    assert tokenizer.tokenize("<|im_start|>a\n\n12 in") == ["<|im_start|>", "a", "ĊĊ", "1", "2", "Ġin"]
    assert tokenizer.decode(tokenizer.encode("ä\n\n12 in")) == "ä\n\n12 in"
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == list(TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token, load_stop_ids(str(folder))) == ("<|im_end|>", "<|im_end|>", (2,))
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"add_bos": True}, "tokenizer.ggml.add_bos_token is True"),
    ],
)
def test_a_file_that_would_be_read_wrongly_is_refused(changes: dict[str, object], message: str, folder: Path) -> None:
    write_gguf(folder / "model.gguf", random_llama(), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        convert_llama(folder / "model.gguf", folder)
