"""Hidden states and log-probabilities equal those of a plain forward pass, in chunks and under masks too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agent_r1.model import forward
from agent_r1.model.forward import (
    PrefixStates,
    hidden_states,
    supports_tree_mask,
    token_logprobs,
    token_scores,
    top_tokens,
)

SMALL = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}


def qwen(dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**SMALL, **changes})).to(dtype).eval()


def families() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=24, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    return {
        "qwen2": qwen(),
        "llama, eager": LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")).double().eval(),
        "gpt2": GPT2LMHeadModel(gpt2).double().eval(),
    }


@pytest.fixture
def case() -> tuple[PreTrainedModel, Tensor, Tensor]:
    model = qwen()
    ids = torch.randint(0, 24, (3, 9))
    return model, hidden_states(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_those_of_the_whole_model(temperature: float) -> None:
    model, ids = qwen(), torch.randint(0, 24, (3, 9))
    table = (model(input_ids=ids).logits / temperature).log_softmax(-1)[:, :-1]
    expected = table.gather(-1, ids[:, 1:, None]).flatten()
    hidden = hidden_states(model, ids)[:, :-1].flatten(0, 1)
    found = token_logprobs(model, hidden, ids[:, 1:].flatten(), temperature)
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(token_logprobs(model, hidden, ids[:, 1:].flatten(), temperature + 0.1), expected)


def test_the_entropy_and_its_gradient_equal_those_of_the_full_distribution(case: tuple) -> None:
    model, hidden, targets = case
    table = (model.lm_head(hidden) / 0.7).log_softmax(-1)
    _, entropy = token_scores(model, hidden, targets, 0.7, entropy_gradient=True)
    assert torch.allclose(entropy, -(table.exp() * table).sum(-1), atol=1e-12)
    assert not token_scores(model, hidden, targets, 0.7)[1].requires_grad
    head = model.lm_head.weight
    (ours,) = torch.autograd.grad(entropy.sum(), head)
    (expected,) = torch.autograd.grad(-(table.exp() * table).sum(), head)
    assert torch.allclose(ours, expected, atol=1e-12) and ours.abs().max() > 1e-3
    logprobs, _ = token_scores(model, hidden.detach(), targets, 0.7, entropy_gradient=True)
    assert not torch.allclose(ours, torch.autograd.grad(logprobs.sum(), head)[0])


def test_several_targets_at_a_position_have_the_log_probabilities_of_each(
    case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden, targets = case
    table, several = (model.lm_head(hidden) / 0.7).log_softmax(-1), torch.randint(0, 24, (len(targets), 3))
    for chunk in (1 << 26, 5 * 24):
        monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", chunk)
        found = token_scores(model, hidden, several, 0.7)[0]
        assert torch.allclose(found, table.gather(-1, several), atol=1e-12) and found.requires_grad


def test_the_most_likely_tokens_are_found_in_chunks_and_below_the_given_number(
    case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hidden, _ = case
    table = (model.lm_head(hidden) / 0.7).log_softmax(-1).detach()
    for chunk in (1 << 26, 5 * 24):
        monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", chunk)
        ids, logprobs = top_tokens(model, hidden, 3, 0.7, vocabulary=24)
        assert torch.equal(ids, table.topk(3).indices) and torch.allclose(logprobs, table.topk(3).values, atol=1e-12)
        assert not logprobs.requires_grad
    ids, logprobs = top_tokens(model, hidden, 30, 0.7, vocabulary=20)
    assert ids.shape == (len(hidden), 20) and int(ids.max()) < 20
    assert torch.allclose(logprobs, table.gather(-1, ids), atol=1e-12)  # of the whole distribution


def largest_kept(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> int:
    """Return the number of elements of the largest tensor that the backward pass keeps."""
    sizes = [0]

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_logprobs(model, hidden, targets, 1.0)
    return max(sizes)


def test_chunks_change_memory_but_no_result(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hidden, targets = case
    hidden = hidden.detach().requires_grad_()

    def scores_and_gradient() -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy = token_scores(model, hidden, targets, 0.7)
        (gradient,) = torch.autograd.grad((logprobs * torch.arange(len(logprobs))).sum(), hidden)
        return logprobs, entropy, gradient

    whole, kept_whole = scores_and_gradient(), largest_kept(model, hidden, targets)
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", 5 * 24)
    for one, other in zip(whole, scores_and_gradient(), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    assert kept_whole == len(targets) * 24
    assert largest_kept(model, hidden, targets) <= hidden.numel()


def test_a_half_precision_model_gives_log_probabilities_in_full_precision() -> None:
    model, ids = qwen(torch.bfloat16), torch.randint(0, 24, (5,))
    logprobs, entropy = token_scores(model, hidden_states(model, ids[None])[0], ids, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen2", "llama, eager", "gpt2"])
def test_tokens_after_a_prefix_that_was_computed_before_have_the_same_states_and_gradients(name: str) -> None:
    model = families()[name].requires_grad_(True)
    ids = torch.randint(0, 24, (4, 12))
    ids[:, :5] = ids[:1, :5]
    positions = torch.tensor([[5, 6, 7, 8, 6, 7, 8]])  # branches of 3 tokens after token 5
    ends = torch.tensor([[7, 4, 4, 4, 7, 7, 7]])

    def loss(states: Tensor) -> Tensor:
        return (states * torch.arange(1, 8)[:, None]).sin().sum()

    def gradients() -> list[Tensor]:
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]

    whole_ends = torch.cat([torch.full((1, 5), 12), ends + 5], 1)
    plain = [
        hidden_states(model, ids[:3])[:, 5:],
        hidden_states(model, ids[3:], torch.cat([torch.arange(5)[None], positions], 1), whole_ends)[:, 5:],
    ]
    (loss(plain[0]) + loss(plain[1])).backward()
    expected = gradients()

    model.zero_grad()
    prefix = PrefixStates(model.base_model, ids[0, :5])
    found = [
        hidden_states(model, ids[:3, 5:], prefix=prefix),
        hidden_states(model, ids[3:, 5:], positions, ends, prefix),
    ]
    for states in found:  # two passes
        loss(states).backward()
    before = gradients()
    prefix.backward()
    # RMS norms compute in float32, also in a float64 model.
    for one, other in zip([*plain, *expected], [*found, *gradients()], strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max()
    assert any((one - other).abs().max() > 1e-3 * one.abs().max() for one, other in zip(expected, before, strict=True))


def test_an_empty_prefix_changes_no_bit() -> None:
    model, ids = qwen(), torch.randint(0, 24, (3, 9))
    prefix = PrefixStates(model.base_model, ids[0, :0])
    assert torch.equal(hidden_states(model, ids, prefix=prefix), hidden_states(model, ids))
    prefix.backward()


@pytest.mark.parametrize("name", ["qwen2", "llama, eager", "gpt2"])
def test_a_branch_under_a_mask_equals_the_branch_alone(name: str) -> None:
    model = families()[name]
    ids = torch.randint(0, 24, (1, 10))  # a prefix of 4, branches of 3 and 3
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]])
    ends = torch.tensor([[10, 10, 10, 10, 7, 7, 7, 10, 10, 10]])
    alone = hidden_states(model, ids[:, [0, 1, 2, 3, 7, 8, 9]])[:, 4:]
    masked = hidden_states(model, ids, positions, ends)[:, 7:]
    assert (masked - alone).abs().max() <= 1e-6 * alone.abs().max()  # RMS norms compute in float32
    assert not torch.allclose(hidden_states(model, ids)[:, 7:], alone, atol=1e-3)
    assert not torch.allclose(hidden_states(model, ids, None, ends)[:, 7:], alone, atol=1e-3)


def test_support_for_tree_masks_is_detected() -> None:
    assert all(supports_tree_mask(model) for model in families().values())
    assert supports_tree_mask(qwen(torch.float32)) and supports_tree_mask(qwen(torch.bfloat16))
    assert not supports_tree_mask(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)).eval())
    mamba = MambaConfig(vocab_size=24, hidden_size=16, state_size=4, num_hidden_layers=1, initializer_range=0.3)
    assert not supports_tree_mask(MambaForCausalLM(mamba).eval())


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_models_whose_positions_depend_on_the_longest_branch_do_not_support_tree_masks(rope: str) -> None:
    size = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    parameters = {
        "dynamic": {"factor": 4.0},
        "longrope": {
            "short_factor": [1.0] * size, "long_factor": [4.0] * size, "original_max_position_embeddings": 6,
            "factor": 4.0,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL, max_position_embeddings=6, rope_parameters={"rope_type": rope, "rope_theta": 100.0, **parameters[rope]}
    )
    model = LlamaForCausalLM(config).double().eval()
    assert not supports_tree_mask(model)
    # control: tokens 0 1 2, then a branch of the tokens 3 to 9, and a branch of the tokens 10 and 11 beside it
    ids, positions = torch.arange(12)[None], torch.tensor([[*range(10), 3, 4]])
    ends = torch.tensor([[*[12] * 3, *[10] * 7, 12, 12]])
    shared, alone = hidden_states(model, ids, positions, ends)[:, 10:], hidden_states(model, ids[:, [0, 1, 2, 10, 11]])
    assert not torch.allclose(shared, alone[:, 3:], atol=1e-2)
