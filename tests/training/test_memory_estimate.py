"""What a run needs at least is measured on its model, and refused with numbers where it is not there."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.algorithms.registry import build_row
from agent_r1.core.errors import InvalidInput
from agent_r1.model.forward import hidden_states
from agent_r1.training.memory_estimate import GIB, check_memory, fixed_needs, kept_bytes, room_of

GRPO, PPO = build_row("grpo", {}), build_row("ppo", {})


def qwen(layers: int = 3) -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0))


def kept_by(model: PreTrainedModel, tokens: int) -> int:
    """The bytes of all that autograd keeps of a sequence, counted independently: by data pointer at the end."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        hidden_states(model, torch.zeros(1, tokens, dtype=torch.int64))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.data_ptr() not in own}
    return sum(storages.values())


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_what_a_long_sequence_keeps_is_known_from_a_short_one(make) -> None:
    model = make().eval()
    assert 500 * kept_bytes(model) == pytest.approx(kept_by(model, 500), rel=0.05)
    assert kept_bytes(model) > 3 * 64 * 4  # control: more than its layers' states alone


def test_weights_are_counted_as_often_as_they_are_there() -> None:
    model = qwen()
    weights = 4 * model.num_parameters()
    assert sum(need.size for need in fixed_needs(model, GRPO)) == 5 * weights  # learner, engine; gradient, two moments
    assert sum(need.size for need in fixed_needs(model, PPO)) == 9 * weights  # and the critic with its own


def refusal(model: PreTrainedModel, context: int, room: int) -> str | None:
    try:
        check_memory(model, GRPO, context, room)
    except InvalidInput as error:
        return str(error)
    return None


def test_a_context_that_cannot_fit_is_refused_and_the_one_it_names_is_not() -> None:
    model, room = qwen(), 60 * 2**20
    assert refusal(model, 512, room) is None
    said = refusal(model, 100_000, room)
    assert said is not None and said.startswith("memory: got 0.1 GiB, where at least") and "100000 tokens" in said
    named = re.search(r"lower --context to (\d+)", said)
    assert named is not None and 1000 < int(named.group(1)) < 100_000
    assert refusal(model, int(named.group(1)), room) is None
    assert refusal(model, int(int(named.group(1)) * 1.2), room) is not None


def test_a_model_that_cannot_fit_at_any_context_is_refused_as_such() -> None:
    said = refusal(qwen(), 512, 2**20)
    assert said is not None and "take a smaller model" in said and "--context" not in said


def test_the_room_is_that_of_the_machine_or_less() -> None:
    assert 0.1 * GIB < room_of(torch.device("cpu")) < 100_000 * GIB
