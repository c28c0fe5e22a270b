"""A LoRA adapter changes a model only by its own matrices, and is the same in memory, in peft and in a merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from checkpointing import make_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agent_r1.core import errors as packages
from agent_r1.core.errors import InvalidInput
from agent_r1.model.adapter import (
    ADAPTER_CONFIG,
    add_adapter,
    copy_sharing_frozen,
    count_adapter,
    load_trained_weights,
    merged_copy,
    save_weights,
    trained_weights,
    without_adapter,
)
from agent_r1.model.config import LoraConfig
from agent_r1.model.load import load_model
from agent_r1.model.value_head import build_value_model
from agent_r1.model.weights import cast_parameters, mixed_precision

IDS = torch.arange(8)[None]


def make_gpt2() -> PreTrainedModel:
    """Return a model with transposed linear layers and tied embeddings."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def adapted(model: PreTrainedModel | None = None, base: str = "base", **settings: Any) -> PreTrainedModel:
    """Return the model with an adapter that changes its outputs, as after training."""
    lora = LoraConfig(**{"rank": 4, **settings})
    model = add_adapter(make_model() if model is None else model, lora, seed=0, base=base)
    random = torch.Generator().manual_seed(1)
    for tensor in trained_weights(model).values():
        tensor.copy_(0.1 * torch.randn(tensor.shape, generator=random))
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS).logits.float()


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    return float((logits(one) - logits(other)).abs().max())


def test_a_new_adapter_changes_no_bit_of_the_outputs_and_depends_on_its_seed_alone() -> None:
    plain, state = make_model(), torch.random.get_rng_state()
    models = [add_adapter(make_model(), LoraConfig(rank=4), seed=seed, base="base") for seed in (0, 0, 1)]
    torch.random.set_rng_state(state)
    add_adapter(make_model(), LoraConfig(rank=4), seed=5, base="base")
    first, same, other = (trained_weights(model) for model in models)
    assert torch.equal(logits(models[0]), logits(plain))
    assert all(torch.equal(first[name], same[name]) for name in first) and torch.equal(
        torch.random.get_rng_state(), state
    )
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_only_the_adapter_is_trained() -> None:
    model = adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained}
    assert trained == trained_weights(model).keys() and not model.training
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert count_adapter(model) == sum(tensor.numel() for tensor in trained_weights(model).values())
    few = adapted(target_modules=("q_proj", "v_proj"))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained_weights(few)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("make", [make_model, make_gpt2])
def test_the_merged_model_equals_the_adapter(make: Any) -> None:
    model, before = adapted(make()), make()
    assert distance(model, before) > 0.01
    assert distance(merged_copy(model), model) < 1e-5
    assert distance(without_adapter(model), before) == 0  # neither changed the model
    assert merged_copy(model).state_dict().keys() == before.state_dict().keys()


def test_an_unchanged_peft_opens_the_adapter(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    model = adapted(base=str(tmp_path / "base"))
    save_weights(tmp_path / "adapter", model, trained_weights(model))
    assert distance(peft.PeftModel.from_pretrained(make_model().eval(), str(tmp_path / "adapter")), model) < 1e-5
    opened: Any = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))
    assert distance(opened.merge_and_unload(), model) < 1e-5
    assert distance(load_model(str(tmp_path / "adapter"), torch.float32), model) == 0


def test_an_adapter_with_further_weights_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    base = type(make_model()).from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(r=2, modules_to_save=["lm_head"])).save_pretrained(str(tmp_path / "more"))
    with pytest.raises(InvalidInput, match=r"its weights and its settings differ: base_model\.model\.lm_head"):
        load_model(str(tmp_path / "more"), torch.float32)


def test_copies_share_the_frozen_weights_and_nothing_else() -> None:
    model = adapted(cast_parameters(make_model(), "bfloat16"))
    frozen = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    own = {p.data_ptr() for p in model.parameters() if p.requires_grad}
    copies = {
        "engine": copy_sharing_frozen(model),
        "reference": without_adapter(model),
        "critic": mixed_precision(build_value_model(model), "bfloat16", keep=("head",)).compute.backbone,
        "compute": mixed_precision(model, "bfloat16").compute,
    }
    head = model.lm_head.weight.data_ptr()
    for role, copied in copies.items():
        pointers = {parameter.data_ptr() for parameter in copied.parameters()}
        assert pointers >= frozen - {head} and not pointers & own, role
    assert {p.dtype for p in copies["compute"].parameters()} == {torch.bfloat16}
    assert copies["engine"].lm_head.weight is not model.lm_head.weight  # casting one must not cast the other
    before = logits(model)
    for tensor in trained_weights(copies["engine"]).values():
        tensor.zero_()
    assert torch.equal(logits(model), before) and not torch.equal(logits(copies["engine"]), before)
    assert torch.equal(logits(copies["engine"]), logits(copies["reference"]))


def test_weights_of_another_adapter_are_refused() -> None:
    with pytest.raises(RuntimeError, match="belong to another adapter"):
        load_trained_weights(adapted(), trained_weights(adapted(target_modules=("q_proj",))))


@pytest.mark.parametrize(
    "target", ["nowhere", "lm_head", "embed_tokens", "q_norm", "q_proj, nowhere", "all-linear, q_proj"]
)
def test_targets_that_are_not_linear_layers_are_refused_with_those_that_are(target: str) -> None:
    said = f"target_modules: got {target}; .*\\(down_proj, .*, q_proj, .*v_proj\\), or all-linear"
    with pytest.raises(InvalidInput, match=said):
        add_adapter(make_model(), LoraConfig(rank=4, target_modules=tuple(target.split(", "))), seed=0, base="base")


def test_if_peft_is_missing_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"pip install 'agent-r1\[lora\]'"):
        add_adapter(make_model(), LoraConfig(rank=4), seed=0, base="base")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_model_name_or_path": None}, "add base_model_name_or_path to adapter_config.json"),
        ({"base_model_name_or_path": "./gone"}, "whose model ./gone cannot be found; put it back"),
        ({"r": 3}, "name a LoRA adapter of this model"),
        ({"use_dora": True}, "a variant of LoRA in model.layers.0.self_attn.q_proj"),
        ({"peft_type": "IA3"}, "name a LoRA adapter of this model"),
    ],
)
def test_a_broken_adapter_is_refused_with_one_line(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    model = adapted(base=str(tmp_path / "base"))
    save_weights(tmp_path / "adapter", model, trained_weights(model))
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(InvalidInput) as refused:
        load_model(str(tmp_path / "adapter"), torch.float32)
    assert said in str(refused.value) and "\n" not in str(refused.value)
