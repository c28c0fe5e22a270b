"""The value model: zero at first, a backbone separate from the policy; checksums of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agent_r1.core.errors import InvalidInput
from agent_r1.model.forward import hidden_states
from agent_r1.model.value_head import HEAD_FILE, build_value_model, load_value_model, save_value_model
from agent_r1.model.weights import weights_checksum


@pytest.fixture
def policy() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


IDS = torch.arange(12).reshape(2, 6)


def test_first_values_are_exactly_zero_at_every_position(policy: PreTrainedModel) -> None:
    values = build_value_model(policy)(IDS)
    assert values.shape == IDS.shape and values.dtype == torch.float32
    assert values.count_nonzero() == 0


def test_the_backbone_is_a_copy_and_training_it_leaves_the_policy_unchanged(policy: PreTrainedModel) -> None:
    critic, before = build_value_model(policy), weights_checksum(policy)
    torch.nn.init.ones_(critic.head.weight)
    expected = hidden_states(policy, IDS).sum(-1)
    assert torch.allclose(critic(IDS), expected, atol=1e-5)
    critic(IDS).square().sum().backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter -= parameter.grad
    assert weights_checksum(policy) == before and all(parameter.grad is None for parameter in policy.parameters())
    assert not torch.allclose(critic(IDS), expected, atol=1e-2)


def test_a_half_precision_backbone_has_a_full_precision_head(policy: PreTrainedModel) -> None:
    assert build_value_model(policy.to(torch.bfloat16))(IDS).dtype == torch.float32


def test_the_checksum_changes_with_one_bit_of_one_weight_only(policy: PreTrainedModel) -> None:
    before = weights_checksum(policy)
    policy(input_ids=IDS)
    assert weights_checksum(policy) == before
    with torch.no_grad():
        weight = policy.model.layers[0].mlp.up_proj.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    assert weights_checksum(policy) != before


def test_log_probabilities_of_sampled_tokens_reach_the_states_after_them(policy: PreTrainedModel) -> None:
    critic = build_value_model(policy, reads_logprobs=True)
    logprobs = torch.zeros(IDS.shape)
    logprobs[0, 3] = -2.0
    assert critic(IDS, logprobs=logprobs).count_nonzero() == 0  # the head begins at zero
    torch.nn.init.ones_(critic.head.weight)
    changed = (critic(IDS, logprobs=logprobs) != critic(IDS)).tolist()
    assert changed == [[False] * 3 + [True] * 3, [False] * 6]
    assert torch.equal(critic(IDS, logprobs=torch.zeros(IDS.shape)), critic(IDS))


@pytest.mark.parametrize("reads_logprobs", [False, True])
def test_a_saved_value_model_gives_the_same_values(
    policy: PreTrainedModel, tmp_path: Path, reads_logprobs: bool
) -> None:
    critic, logprobs = build_value_model(policy, reads_logprobs), -torch.rand(IDS.shape)
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.ones_(critic.head.bias)
    save_value_model(critic, tmp_path / "critic")
    loaded = load_value_model(tmp_path / "critic", torch.float32)
    assert torch.equal(loaded(IDS, logprobs=logprobs), critic(IDS, logprobs=logprobs))


def test_a_folder_without_a_head_is_refused_and_so_is_a_damaged_one(policy: PreTrainedModel, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=f"without {HEAD_FILE}"):
        load_value_model(tmp_path, torch.float32)
    (tmp_path / HEAD_FILE).write_bytes(b"no tensors")
    with pytest.raises(InvalidInput, match="value model: got"):
        load_value_model(tmp_path, torch.float32)
