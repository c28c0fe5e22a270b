"""Hidden states of a causal language model, and log-probabilities of target tokens.

Shapes: B rows, T tokens, H hidden size, N positions with target tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agent_r1.model.onednn import has_onednn, padded_length
from agent_r1.model.tree_attention import (
    SMALL_TREE,
    TREE_ATTENTION,
    USUAL_ATTENTION,
    additive_mask,
    tree_mask,
    tree_parts,
)
from agent_r1.model.vision import PassImages, compute_features, embed_with_images, has_position_rows, text_decoder

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
        """Propagate the summed gradients of the prefix's keys and values to the weights.

        First run the backward passes of all forward passes that read the prefix. Then call this method once.
        """
        pairs = zip(self._computed, self._copies, strict=True)
        read = [(tensor, copy.grad.to(tensor.dtype)) for tensor, copy in pairs if copy.grad is not None]
        if read:
            tensors, gradients = zip(*read, strict=True)
            torch.autograd.backward(tensors, gradients)


class CachedPrefix:
    """A KV cache for passes over a single row. The cache is kept from one pass to the next.

    Each pass adds the keys and values of its tokens. Unlike :class:`PrefixStates`, this class computes no gradients.
    """

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
    """Return the log-probabilities (N,) of the target tokens, each given the hidden state that predicts the token.

    If there are more than ``LOGITS_PER_CHUNK`` logits, they are computed in chunks, and only one chunk is in memory at
    a time.
    """
    return token_scores(model, hidden, targets, temperature)[0]


def token_scores(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the targets, entropies) for N positions.

    ``hidden`` (N, H) holds, for each position, the hidden state that predicts the token at this position. ``targets``
    is (N,), or (N, m) with m tokens per position. The log-probabilities have the shape of ``targets``. See
    :func:`token_logprobs` for the formula of a log-probability.

    The entropies (N,) are in nats, and have a gradient only if ``entropy_gradient`` is true. The backward pass can run
    only once.
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
    """Return the most likely next tokens for each of N hidden states, and their log-probabilities.

    Both results are (N, k): the ids of the k most likely tokens, and the log-probabilities of the k tokens. k is the
    smallest of ``count``, ``vocabulary`` and the model's own vocabulary size. ``hidden`` is (N, H). Only token ids
    below ``vocabulary`` are returned. If ``model`` is a teacher, ``vocabulary`` is the vocabulary size of the policy.
    """
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

    If so, several branches of a trajectory can share their common prefix in one sequence. This function runs the model
    on a sequence with two branches. The hidden state of the second branch must be the same without the first branch, up
    to rounding errors. Models with a sliding window, a dynamic RoPE or three positions per token are not run: for them,
    the result is False.
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
    """Switch the model to tree attention if possible. Return whether the model now uses tree attention.

    Tree attention divides the attention over a tree of tokens into parts, and computes each part separately (see
    :mod:`agent_r1.model.tree_attention`). The switch is possible only if the model is on a CPU and passes a test: for a
    tree of tokens, tree attention must give the same hidden states as attention with a mask, up to rounding errors. For
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
