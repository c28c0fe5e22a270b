"""Models load from a folder; a broken one is an error of one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from agent_r1.core.errors import InvalidInput
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(path)
    return path


@pytest.mark.parametrize(("eos_token_id", "expected"), [(7, (7,)), ([7, 5], (7, 5)), (None, ())])
def test_stop_tokens_come_from_generation_config(folder: Path, eos_token_id: object, expected: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}), "utf-8")
    assert load_stop_ids(str(folder)) == expected


def test_without_generation_config_there_are_no_stop_tokens_and_a_broken_one_is_an_error(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{", "utf-8")
    with pytest.raises(InvalidInput, match="generation_config"):
        load_stop_ids(str(folder))
    (folder / "generation_config.json").unlink()
    assert load_stop_ids(str(folder)) == ()


def test_a_folder_loads_with_its_weights_in_the_given_dtype(folder: Path) -> None:
    model = load_model(str(folder), torch.float32)
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])
    assert not model.training
    assert load_model(str(folder), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SMALL)),
        MistralForCausalLM(MistralConfig(**SMALL)),
        Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
        Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_of_several_families_load(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path), torch.float32)) is type(model)


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, initializer_range=0.3)),
        CohereForCausalLM(CohereConfig(**SMALL)),
    ],
    ids=["logits are capped", "logits are scaled"],
)
def test_a_model_that_caps_or_scales_its_logits_is_an_error(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="caps or scales"):
        load_model(str(tmp_path), torch.float32)


def half_the_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def one_weight_less(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def other_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}), "utf-8")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


def an_encoder_decoder(folder: Path) -> None:
    shutil.rmtree(folder)
    T5ForConditionalGeneration(T5Config(vocab_size=24, d_model=8, d_ff=8, num_layers=1, num_heads=1)).save_pretrained(
        folder
    )


def an_empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        half_the_weights,
        no_weights,
        one_weight_less,
        other_width,
        broken_config,
        an_encoder_decoder,
        an_empty_folder,
    ],
)
def test_an_incomplete_model_is_an_error_of_one_line(
    damage: Callable[[Path], None], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    capfd.readouterr()
    with pytest.raises(InvalidInput) as caught:
        load_model(str(folder), torch.float32)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_tokenizer_is_an_error_and_not_an_empty_tokenizer(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        load_tokenizer(str(folder))


def test_a_broken_tokenizer_is_an_error_of_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(InvalidInput) as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def fill(value: float, index: int = 3) -> Callable[[Path], None]:
    """Return a damage: one value of a weight is replaced."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[index] = value
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_an_error_that_names_it(value: float, folder: Path) -> None:
    fill(value)(folder)
    message = r"model\.layers\.1\.mlp\.up_proj\.weight has 1 values that are NaN or infinite"
    with pytest.raises(InvalidInput, match=message):
        load_model(str(folder), torch.float32)


def test_logits_that_overflow_are_an_error(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):
        tensors[name] *= 1e30
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match="weights are finite and whose logits are not"):
        load_model(str(folder), torch.float32)


def test_weights_in_a_pickle_are_not_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="safetensors"):
        load_model(str(folder), torch.float32)
