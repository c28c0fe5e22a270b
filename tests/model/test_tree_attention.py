"""Attention over trees by parts: equal to attention under the mask of the trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agent_r1.model import forward as tree_attention
from agent_r1.model.forward import (
    PrefixStates,
    additive_mask,
    backbone_of,
    hidden_states,
    tree_mask,
    tree_parts,
    use_tree_attention,
    uses_tree_attention,
)

VOCABULARY = 32


def llama(kv_heads: int = 2, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, initializer_range=0.3, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def layout(lengths: list[int], parents: list[int | None]) -> tuple[Tensor, Tensor]:
    """Return (positions, subtree_end), each (1, T), of chains of tokens in depth-first order."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    depths = list[int]()
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + lengths[parent])
    for number in reversed(range(len(lengths))):
        parent = parents[number]
        if parent is not None:
            ends[parent] = max(ends[parent], ends[number])
    positions = [depth + place for depth, length in zip(depths, lengths, strict=True) for place in range(length)]
    subtree_end = [end for end, length in zip(ends, lengths, strict=True) for _ in range(length)]
    return torch.tensor([positions]), torch.tensor([subtree_end])


TWO_TREES = layout([70, 40, 30, 30, 50, 20, 3, 2, 4], [None, 0, 1, 1, 0, None, 5, 5, 7])
"""Two trees of chains; the second tree is small."""


def states_and_gradients(model: PreTrainedModel, positions: Tensor, ends: Tensor, prefix: int) -> list[Tensor]:
    """Return the hidden states of random tokens after ``prefix`` tokens, and the gradients of the weights."""
    tokens = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (1, prefix + positions.shape[1]), generator=tokens)
    model.zero_grad()
    before = PrefixStates(backbone_of(model), ids[0, :prefix])
    states = hidden_states(model, ids[:, prefix:], positions + prefix, ends, before)
    (states * torch.arange(1, states.shape[1] + 1)[:, None]).sin().sum().backward()
    before.backward()
    return [states.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("prefix", [0, 9])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_states_and_gradients_are_those_under_the_mask(prefix: int, kv_heads: int) -> None:
    masked, by_parts = llama(kv_heads), llama(kv_heads)
    assert use_tree_attention(by_parts) and uses_tree_attention(by_parts) and not uses_tree_attention(masked)
    expected = states_and_gradients(masked, *TWO_TREES, prefix)
    found = states_and_gradients(by_parts, *TWO_TREES, prefix)
    for one, other in zip(expected, found, strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max()  # RMS norms compute in float32
    positions, ends = TWO_TREES
    control = states_and_gradients(by_parts, positions, torch.full_like(ends, ends.shape[1]), prefix)
    assert (expected[0] - control[0]).abs().max() > 1e-2 * expected[0].abs().max()


def test_passes_without_a_tree_keep_their_bits() -> None:
    usual, by_parts = llama(dtype=torch.float32), llama(dtype=torch.float32)
    assert use_tree_attention(by_parts)
    ids = torch.randint(0, VOCABULARY, (3, 50))
    assert torch.equal(hidden_states(usual, ids), hidden_states(by_parts, ids))
    assert usual(input_ids=ids).logits.equal(by_parts(input_ids=ids).logits)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=9), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_parts_cover_the_mask_of_any_trees_exactly_once(chains: list[tuple[int, int]], prefix: int) -> None:
    # each chain hangs below an ancestor of the chain before it, a number of levels up, or is a new tree
    parents, path = list[int | None](), list[int]()
    for number, (_, up) in enumerate(chains):
        path = path[: max(0, len(path) - up)]
        parents.append(path[-1] if path else None)
        path.append(number)
    _, ends = layout([length for length, _ in chains], parents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "SMALL_TREE", 4)
        parts = tree_parts(ends[0], prefix, torch.float64)
    seen = torch.zeros(ends.shape[1], prefix + ends.shape[1])
    for part in (*parts.own, *parts.above):
        block = torch.ones_like(seen[part.queries, part.keys])
        block = block.tril() if part.is_causal else block
        seen[part.queries, part.keys] += block if part.mask is None else (part.mask[0, 0] == 0).to(block)
    assert torch.equal(seen[:, prefix:], tree_mask(ends)[0].float()) and bool((seen[:, :prefix] == 1).all())
    owned = [place for part in parts.own for place in range(part.queries.start, part.queries.stop)]
    assert owned == list(range(ends.shape[1]))


def test_models_with_another_attention_keep_it() -> None:
    eager = llama(attention="eager")
    assert not use_tree_attention(eager) and eager.config._attn_implementation == "eager"


def test_a_model_that_loses_the_parts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    usual = type(model.base_model).forward

    def forward(self: PreTrainedModel, tree_parts: object = None, **arguments: object) -> object:
        return usual(self, **arguments)

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    assert not use_tree_attention(model) and model.config._attn_implementation == "sdpa"


def test_an_additive_mask_excludes_what_the_mask_hides() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    assert additive_mask(mask, torch.float32).exp().equal(mask.float())
