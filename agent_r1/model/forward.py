"""Hidden states of a causal language model, log-probabilities of target tokens, and attention over trees of tokens.

A row can hold a tree of tokens in depth-first order, in which a token attends to itself and to its ancestors. A mask
would hide most of the scores after they are computed. So the attention is divided into parts, by chains: sequences of
tokens without branches. The tokens of a chain attend to their own chain, and all descendants of a chain attend to it.
The tokens of a part are contiguous, so torch's kernel computes each part in one call, and also returns the logarithm of
the sum of exp(score) of each token, by which the results of the parts are combined exactly.

Shapes: B rows, T tokens, S tokens of a prefix before them, H hidden size (in attention: heads), K key-value heads, D
head size, N positions with target tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agent_r1.model.vision import PassImages, compute_features, embed_with_images, has_position_rows, text_decoder
from agent_r1.model.weights import has_onednn, padded_length

TREE_ATTENTION = "agent_r1_tree"
USUAL_ATTENTION = "sdpa"
"""transformers' name of the usual attention, which ``TREE_ATTENTION`` replaces for trees."""

SMALL_TREE = 64
"""The most tokens of a subtree that one call with a mask computes faster than several calls without a mask."""

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
    """The attention over trees of tokens, perhaps after a prefix, divided into calls of the kernel."""

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
    """Divide the attention over the T tokens of one or more trees into parts, each one call of the kernel.

    Each token attends to itself, to its ancestors, and to all ``prefix`` tokens before the trees. ``subtree_end`` (T,)
    holds the index after the last token of each token's subtree.
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


PART_LOGITS = 1 << 18
"""Number of logits that are processed together, so that they fit into a processor's cache: 1 MiB in fp32."""


class SoftmaxScores(NamedTuple):
    """Log-probabilities (N, m) of m target tokens at each of N positions, and entropies (N,) in nats."""

    logprobs: Tensor
    entropy: Tensor


def softmax_scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool
) -> SoftmaxScores:
    """Return the log-probabilities (N, m) of m target tokens at each of N positions, and the entropies (N,).

    Entropies have a gradient only if ``entropy_gradient`` is true. So the backward pass of ``head`` must not read the
    logits, and the backward pass of this function can run only once.
    """
    scores = cast(Any, _Scores).apply(head(hidden), targets, temperature, entropy_gradient)
    return SoftmaxScores(*scores)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> Any:
        table = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))  # (N, V), without a copy in fp32
        logprobs, entropy = table.new_empty(targets.shape), table.new_empty(len(targets))
        for rows in _parts(table):
            part = (table[rows] / temperature).log_softmax(-1)
            torch.gather(part, -1, targets[rows], out=logprobs[rows])
            table[rows] = part
            finite = part.clamp(min=torch.finfo(part.dtype).min)  # p log p of an excluded token: 0, not 0 * -inf
            entropy[rows] = -(part.exp() * finite).sum(-1)
        ctx.save_for_backward(table, targets, entropy)
        ctx.temperature, ctx.dtype, ctx.entropy_gradient = temperature, logits.dtype, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, logprobs_grad: Tensor, entropy_grad: Tensor) -> Any:
        table, targets, entropy = ctx.saved_tensors
        for rows in _parts(table):
            logs = table[rows]
            upstream = torch.zeros_like(logs).scatter_add_(1, targets[rows], logprobs_grad[rows])
            gradient = torch._log_softmax_backward_data(upstream, logs, -1, logs.dtype)
            if ctx.entropy_gradient:
                finite = logs.clamp(min=torch.finfo(logs.dtype).min)
                gradient -= entropy_grad[rows, None] * logs.exp() * (finite + entropy[rows, None])
            table[rows] = gradient / ctx.temperature
        return table.to(ctx.dtype), None, None, None


def _parts(table: Tensor) -> list[slice]:
    # Fake tensors only measure memory, and all parts need the same memory, so for a fake table only the first part is
    # returned.
    count = max(1, PART_LOGITS // table.shape[1]) if table.device.type == "cpu" else max(1, len(table))
    parts = [slice(first, first + count) for first in range(0, len(table), count)]
    return parts[:1] if isinstance(table, FakeTensor) else parts


DYNAMIC_ROPE = ("dynamic", "longrope")
"""Types of RoPE in which the rotation frequencies depend on the largest position in a forward pass."""

LOGITS_PER_CHUNK = 1 << 26
"""Maximum number of logits that are computed at once (256 MiB in fp32)."""


class PrefixStates:
    """The keys and values of a prefix: S tokens that stand before the first token of every row.

    The keys and values are computed once, and several passes can read them (:meth:`cache`). The gradients from all
    these passes are added up. At the end, :meth:`backward` propagates the sums to the weights.

    Args:
        backbone: the model without its head. If S is above 0, activation checkpointing of the model must be off.
        ids: (S,) the tokens of the prefix. S can be 0.
    """

    def __init__(self, backbone: PreTrainedModel, ids: Tensor) -> None:
        self.num_tokens = len(ids)
        cache = DynamicCache()
        if self.num_tokens:
            text_decoder(backbone)(input_ids=ids[None], past_key_values=cache, use_cache=True)
        layers = cast(list[DynamicLayer], cache.layers)
        # keys and values of each layer: (1, K, S, D), with K key-value heads of size D
        self._computed = [cast(Tensor, tensor) for layer in layers for tensor in (layer.keys, layer.values)]
        # In float32 or a more precise type, because the gradients of all passes are added up in them.
        copies = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in self._computed]
        self._copies = [copy.requires_grad_(t.requires_grad) for copy, t in zip(copies, self._computed, strict=True)]

    def cache(self, rows: int) -> DynamicCache | None:
        """Return a KV cache with the prefix in each of ``rows`` rows; None if the prefix is empty."""
        if not self.num_tokens:
            return None
        cache = DynamicCache()
        read = [copy.to(t.dtype) for copy, t in zip(self._copies, self._computed, strict=True)]
        for index, (keys, values) in enumerate(zip(read[::2], read[1::2], strict=True)):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), index)
        return cache

    def backward(self) -> None:
        """Propagate the summed gradients of the prefix to the weights, once, after all passes that read it."""
        pairs = zip(self._computed, self._copies, strict=True)
        read = [(tensor, copy.grad.to(tensor.dtype)) for tensor, copy in pairs if copy.grad is not None]
        if read:
            tensors, gradients = zip(*read, strict=True)
            torch.autograd.backward(tensors, gradients)


class CachedPrefix:
    """The keys and values of a single row, to which each pass adds its tokens, without gradients."""

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()
        self._cache = DynamicCache()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def cache(self, rows: int) -> DynamicCache:
        """Return the KV cache for a pass over ``rows`` rows."""
        if rows != 1:
            raise ValueError(f"a cached prefix is for one row, got {rows}")
        return self._cache

    def keep(self, token_ids: tuple[int, ...]) -> None:
        """Remove all keys and values after the longest common prefix of the cached tokens and ``token_ids``."""
        pairs = zip(self.token_ids, token_ids, strict=False)
        same = next((i for i, (held, wanted) in enumerate(pairs) if held != wanted), None)
        self.token_ids = self.token_ids[: min(len(self.token_ids), len(token_ids)) if same is None else same]
        self._cache.crop(len(self.token_ids) - self._cache.get_seq_length())  # minus the number of tokens to remove

    def append(self, token_ids: tuple[int, ...]) -> None:
        """Record that the cache now also holds ``token_ids``, the first tokens of the latest pass."""
        self.token_ids += token_ids


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head."""
    return cast(PreTrainedModel, model.base_model)


def hidden_states(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None = None,
    subtree_end: Tensor | None = None,
    prefix: PrefixStates | CachedPrefix | None = None,
    images: PassImages | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Return the hidden states (B, T, H) of the last layer for ``ids`` (B, T). The head is not applied.

    Args:
        model: a causal language model, with or without its head.
        ids: (B, T) tokens. Pad rows on the right: with causal attention, no token then attends to padding.
        positions: (B, T) positions. Default: S .. S + T - 1 after a ``prefix`` of S tokens.
        subtree_end: (B, T) the index after the last token of each token's subtree, if each row holds trees of tokens in
            depth-first order. A token attends to itself and to the tokens above it. Default: causal attention.
        prefix: the keys and values of S tokens that stand before the first token of every row. All tokens attend to
            these S tokens.
        images: the images in ``ids``. In a model with three positions per token, ``images.positions`` replaces
            ``positions``.
        added: (B, T, H) vectors that are added to the token embeddings.
    """
    backbone, tokens = backbone_of(model), ids.shape[1]
    decoder = text_decoder(backbone)
    if len(ids) == 1 and images is None and not isinstance(prefix, CachedPrefix) and has_onednn(decoder):
        ids, positions, subtree_end, added = _pad_row(ids, positions, subtree_end, added)
    cache = None if prefix is None else prefix.cache(len(ids))
    read: dict[str, Any] = {"input_ids": ids}
    if images is not None:
        read = embed_with_images(decoder, ids, images.index, compute_features(backbone, images.pixels))
        positions = positions if images.positions is None else images.positions
    elif added is not None:
        read = {"inputs_embeds": decoder.get_input_embeddings()(ids)}
    if added is not None:
        read["inputs_embeds"] = read["inputs_embeds"] + added
    if cache is not None:
        read["past_key_values"] = cache
    dtype, before = next(decoder.parameters()).dtype, 0 if prefix is None else prefix.num_tokens
    if subtree_end is None:
        read["attention_mask"] = None
    elif uses_tree_attention(decoder) and len(ids) == 1:
        read["tree_parts"] = tree_parts(subtree_end[0], before, dtype)
        # A mask with four dimensions keeps transformers from making one. The attention over parts does not read it.
        read["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=dtype)
    else:
        mask = functional.pad(tree_mask(subtree_end), (before, 0), value=True)  # (B, T, S + T)
        # Eager attention takes additive masks, SDPA takes boolean or additive masks: an additive mask works for both.
        read["attention_mask"] = additive_mask(mask, dtype)[:, None]
    return decoder(**read, position_ids=positions, use_cache=cache is not None).last_hidden_state[:, :tokens]


def _pad_row(
    ids: Tensor, positions: Tensor | None, subtree_end: Tensor | None, added: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    # Without padding here, each linear layer would pad its inputs for oneDNN.
    tokens = ids.shape[1]
    missing = padded_length(tokens) - tokens
    if not missing:
        return ids, positions, subtree_end, added
    return (
        functional.pad(ids, (0, missing)),
        None if positions is None else functional.pad(positions, (0, missing)),
        # one tree without branches, after the trees of the row
        None if subtree_end is None else functional.pad(subtree_end, (0, missing), value=tokens + missing),
        None if added is None else functional.pad(added, (0, 0, 0, missing)),
    )


def token_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (N,) of the targets. See :func:`token_scores`."""
    return token_scores(model, hidden, targets, temperature)[0]


def token_scores(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the targets, entropies in nats) for N positions.

    ``hidden`` (N, H) holds the states that predict the ``targets``, (N,) or (N, m) with m tokens per position. More
    than ``LOGITS_PER_CHUNK`` logits are computed in chunks, one at a time. The backward pass can run only once.
    """
    head = model.get_output_embeddings()
    columns = targets if targets.dim() == 2 else targets[:, None]  # (N, m)
    size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    score = partial(softmax_scores, head, temperature=temperature, entropy_gradient=entropy_gradient)
    if len(targets) <= size:
        logprobs, entropy = score(hidden, columns)
        return logprobs.view_as(targets), entropy
    parts = [
        checkpoint(score, states, tokens, use_reentrant=False)
        for states, tokens in zip(hidden.split(size), columns.split(size), strict=True)
    ]
    return torch.cat([part.logprobs for part in parts]).view_as(targets), torch.cat([part.entropy for part in parts])


def _log_softmax(head: nn.Module, hidden: Tensor, temperature: float) -> Tensor:
    logits = head(hidden)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


@torch.no_grad()
def top_tokens(
    model: PreTrainedModel, hidden: Tensor, count: int, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return (ids, log-probabilities), each (N, k), of the k = ``count`` likeliest tokens below ``vocabulary``."""
    head = model.get_output_embeddings()
    size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    count = min(count, vocabulary, head.weight.shape[0])
    tables = (_log_softmax(head, states, temperature)[:, :vocabulary] for states in hidden.split(size))
    parts = [table.topk(count, -1) for table in tables]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def has_dynamic_rope(model: PreTrainedModel) -> bool:
    """Return whether the position embedding of a token depends on the largest position in the same pass."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    return any(one.get("rope_type") in DYNAMIC_ROPE for one in (parameters, *by_layer_type))


@torch.no_grad()
def supports_tree_mask(model: PreTrainedModel) -> bool:
    """Return whether the attention mask alone determines which tokens the model attends to.

    If so, branches of a trajectory can share their prefix in one sequence. The model runs on a sequence with two
    branches: the second must have the same hidden state without the first. Models with a sliding window, a dynamic RoPE
    or three positions per token are not run: the result is False.
    """
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return False  # the test below is shorter than the window
    if has_dynamic_rope(model):
        return False  # the test below is shorter than the positions from which on the frequencies change
    if has_position_rows(model):
        return False  # after an image, the position of a token is not its depth in the tree
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    positions, ends = (torch.tensor([row], device=model.device) for row in ([0, 1, 2, 2], [4, 4, 3, 4]))
    try:
        shared = hidden_states(model, ids, positions, ends)[0, 3]
    except (TypeError, ValueError, RuntimeError):  # the backbone does not accept the mask or the positions
        return False
    alone = hidden_states(model, ids[:, [0, 1, 3]])[0, 2]
    difference = (shared - alone).abs().max() / alone.abs().max()
    return bool(difference <= 32 * torch.finfo(shared.dtype).eps)


def uses_tree_attention(model: PreTrainedModel) -> bool:
    """Return whether :func:`use_tree_attention` has changed the model."""
    return bool(model.config.get_text_config()._attn_implementation == TREE_ATTENTION)


def may_use_tree_attention(model: PreTrainedModel) -> bool:
    """Return whether the model is on a CPU, with the attention ``USUAL_ATTENTION`` or ``TREE_ATTENTION``."""
    usual = bool(model.config.get_text_config()._attn_implementation == USUAL_ATTENTION)
    return model.device.type == "cpu" and (usual or uses_tree_attention(model))


@torch.no_grad()
def use_tree_attention(model: PreTrainedModel) -> bool:
    """Switch a model on a CPU to attention over parts of trees, and return whether it now uses that.

    It is switched only if a tree of tokens then has the same hidden states as with a mask, up to rounding errors. For
    sequences without trees, the attention does not change.
    """
    if not may_use_tree_attention(model) or uses_tree_attention(model):
        return uses_tree_attention(model)
    decoder = text_decoder(backbone_of(model))
    length, branch = 3 * SMALL_TREE, SMALL_TREE  # tokens of the tree, and of each of two branches
    places = torch.arange(length)[None]
    ends = torch.where((places >= branch) & (places < 2 * branch), 2 * branch, length)
    positions = torch.where(places >= 2 * branch, places - branch, places)
    ids = places % model.config.get_text_config().vocab_size
    expected = hidden_states(model, ids, positions, ends)
    decoder.set_attn_implementation(TREE_ATTENTION)
    try:
        found = hidden_states(model, ids, positions, ends)
    except (TypeError, ValueError, RuntimeError):  # the layers do not pass the parts on
        found = torch.full_like(expected, math.nan)
    difference = (found - expected).abs().max() / expected.abs().max()
    if difference <= 64 * torch.finfo(expected.dtype).eps:
        return True
    decoder.set_attn_implementation(USUAL_ATTENTION)
    return False
