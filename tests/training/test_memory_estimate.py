"""The memory estimate is measured on the model, and a run that cannot fit is refused with numbers."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.model.forward import hidden_states
from agent_r1.training.memory_estimate import GIB, activation_bytes, available_memory, check_memory, fixed_uses

GRPO, PPO = build_algorithm("grpo", {}), build_algorithm("ppo", {})


def qwen(layers: int = 3) -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0))


def saved_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Return the bytes that autograd saves for a sequence, counted in another way: by data pointer at the end."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        hidden_states(model, torch.zeros(1, tokens, dtype=torch.int64))
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    storages = [t.untyped_storage() for t in saved if t.data_ptr() not in parameters]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_activations_of_a_long_sequence_are_predicted_from_a_short_one(make) -> None:
    model = make().eval()
    assert 500 * activation_bytes(model) == pytest.approx(saved_bytes(model, 500), rel=0.05)
    assert activation_bytes(model) > 3 * 64 * 4  # control: more than the hidden states of the layers


def test_weights_count_once_for_each_copy() -> None:
    model = qwen()
    weights = 4 * model.num_parameters()
    assert sum(use.size for use in fixed_uses(model, GRPO)) == 5 * weights  # trainer, engine; gradient, two moments
    assert sum(use.size for use in fixed_uses(model, PPO)) == 9 * weights  # and the critic with its own


def refusal(model: PreTrainedModel, context: int, available: int) -> str | None:
    try:
        check_memory(model, GRPO, context, available)
    except InvalidInput as error:
        return str(error)
    return None


def test_a_context_that_cannot_fit_is_refused_and_the_suggested_one_fits() -> None:
    model, available = qwen(), 60 * 2**20
    assert refusal(model, 512, available) is None
    message = refusal(model, 100_000, available)
    assert (
        message is not None and message.startswith("memory: got 0.1 GiB, but at least") and "100000 tokens" in message
    )
    suggested = re.search(r"lower --context to (\d+)", message)
    assert suggested is not None and 1000 < int(suggested.group(1)) < 100_000
    assert refusal(model, int(suggested.group(1)), available) is None
    assert refusal(model, int(int(suggested.group(1)) * 1.2), available) is not None


def test_a_model_that_fits_at_no_context_is_refused_without_a_suggested_context() -> None:
    message = refusal(qwen(), 512, 2**20)
    assert message is not None and "take a smaller model" in message and "--context" not in message


def test_available_memory_is_at_most_that_of_the_machine() -> None:
    assert 0.1 * GIB < available_memory(torch.device("cpu")) < 100_000 * GIB
