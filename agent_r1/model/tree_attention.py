"""Attention over trees of tokens, computed in parts instead of with a mask.

In a tree, a token attends to itself and to its ancestors. The usual method is a mask: the scores of all pairs of tokens
are computed, and then most scores are hidden. This module divides the attention into parts, so that most of the hidden
scores are not computed.

The tokens are in depth-first order. A chain is a sequence of tokens without branches: every token of a chain except the
last has exactly one child, the next token. A token attends to the earlier tokens of its own chain, and to all tokens of
the chains above. So there are at most two parts per chain:

- The tokens of the chain attend to their own chain.
- All descendants of the chain attend to the chain.

The tokens of a part are contiguous, so torch's attention kernel computes each part in one call. For each token, the
kernel also returns the logarithm of the sum of exp(score). With these logarithms, the results of the parts are combined
exactly.

Shapes: B sequences, T tokens, S tokens before the T tokens, H attention heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TREE_ATTENTION = "agent_r1_tree"
USUAL_ATTENTION = "sdpa"
"""transformers' name of the usual attention, which ``TREE_ATTENTION`` replaces for trees."""

SMALL_TREE = 64
"""Largest number of tokens of a subtree whose attention is computed in one call of the kernel, with a mask. For such a
small subtree, one call with a mask takes less time than several calls without a mask."""

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPart:
    """One call of the attention kernel, in which some tokens (queries) attend to some tokens (keys)."""

    queries: slice  # the indices of the queries among the T tokens of the trees
    # the indices of the keys among S + T tokens: first the S tokens of a prefix, then the T tokens of the trees
    keys: slice
    is_causal: bool  # whether a query attends only to its own token and to earlier tokens
    mask: Tensor | None = None  # (1, 1, queries, keys) the mask that is added to the scores, or None


@dataclass(frozen=True, slots=True, eq=False)
class TreeParts:
    """The attention over trees of tokens, divided into parts. Each part is one call of the kernel.

    A chain is a sequence of tokens without branches (see the docstring of this module). The trees can follow a prefix:
    earlier tokens to which all tokens of the trees attend.
    """

    # the parts in which tokens attend to tokens of the same chain, or of the same small subtree. A small subtree has at
    # most ``SMALL_TREE`` tokens, and is not divided into chains. Each token is a query in exactly one part of ``own``
    own: tuple[AttentionPart, ...]
    # the parts in which tokens attend to a chain above their own chain, or to the prefix
    above: tuple[AttentionPart, ...]


def tree_mask(subtree_end: Tensor) -> Tensor:
    """Return the attention mask of trees of tokens: (B, T, T) bool."""
    place = torch.arange(subtree_end.shape[1], device=subtree_end.device)  # (T,)
    return (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < subtree_end[:, None, :])


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to the scores: 0 if ``mask`` is true, else the lowest finite number."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def tree_parts(subtree_end: Tensor, prefix: int, dtype: torch.dtype) -> TreeParts:
    """Divide the attention over the T tokens of one or more trees into parts.

    Each part is one call of the attention kernel. Each token attends to itself, to its ancestors, and to all tokens
    before the trees. ``prefix`` is the number of tokens before the trees. ``subtree_end`` (T,) holds the index after
    the last token of each token's subtree. ``dtype`` is the data type of the masks.
    """
    own, above = list[AttentionPart](), list[AttentionPart]()
    if prefix:
        above.append(AttentionPart(slice(0, len(subtree_end)), slice(0, prefix), is_causal=False))
    ends, start = subtree_end.tolist(), 0
    while start < len(ends):
        # the chain that begins with the token ``start``; all its tokens have subtrees with the same end
        end, chain_end = ends[start], start + 1
        while chain_end < len(ends) and ends[chain_end] == end:
            chain_end += 1
        chain = slice(prefix + start, prefix + chain_end)
        if chain_end < end <= start + SMALL_TREE:  # the whole subtree is one part, with a mask
            mask = additive_mask(tree_mask(subtree_end[None, start:end] - start), dtype)
            own.append(AttentionPart(slice(start, end), slice(prefix + start, prefix + end), False, mask[None]))
            start = end
            continue
        own.append(AttentionPart(slice(start, chain_end), chain, is_causal=True))
        if chain_end < end:
            above.append(AttentionPart(slice(chain_end, end), chain, is_causal=False))
        start = chain_end
    return TreeParts(tuple(own), tuple(above))


class _TreeAttention(torch.autograd.Function):
    """The attention over trees of tokens, computed in parts (:class:`TreeParts`)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: TreeParts, scaling: float) -> Tensor:
        mixed = torch.empty_like(query)
        totals = torch.empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))  # (B, H, T)

        def attend(part: AttentionPart) -> tuple[Tensor, Tensor]:
            read = (query[:, :, part.queries], key[:, :, part.keys], value[:, :, part.keys])
            found, total = _attend(*read, 0.0, part.is_causal, attn_mask=part.mask, scale=scaling)
            return found, total

        for part in parts.own:
            mixed[:, :, part.queries], totals[:, :, part.queries] = attend(part)
        for part in parts.above:
            found, total = attend(part)
            before, now = totals[:, :, part.queries], mixed[:, :, part.queries]
            # Softmax over the keys of both: the weights of the results are e^before and e^total, divided by their sum.
            joint = torch.logaddexp(before, total)
            now.mul_((before - joint).exp_()[..., None]).add_(found * (total - joint).exp_()[..., None])
            before.copy_(joint)
        ctx.save_for_backward(query, key, value, mixed, totals)
        ctx.parts, ctx.scaling = parts, scaling
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mixed, totals = ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for part in (*ctx.parts.own, *ctx.parts.above):
            rows, keys = (slice(None), slice(None), part.queries), (slice(None), slice(None), part.keys)
            added = _attend_backward(
                *(gradient[rows], query[rows], key[keys], value[keys], mixed[rows], totals[rows]),
                *(0.0, part.is_causal),
                attn_mask=part.mask,
                scale=ctx.scaling,
            )
            for whole, place, one in zip(gradients, (rows, keys, keys), added, strict=True):
                whole[place] += one
        return *gradients, None, None


def _tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    tree_parts: TreeParts | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if tree_parts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # each key-value head belongs to several attention heads
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    mixed = cast(Any, _TreeAttention).apply(query, key, value, tree_parts, scaling)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, _tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
