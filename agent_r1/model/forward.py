"""Hidden states of any causal language model, and log-probabilities of target tokens from them.

Shapes: B rows, T tokens, H hidden size, N positions with target tokens, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

LOGITS_PER_CHUNK = 1 << 26
"""Maximum number of logits in one chunk (256 MiB in fp32)."""


MIN_SHARED_PREFIX = 64
"""Smallest number of equal first tokens that are computed once for all rows. Fewer are not worth an additional pass."""


def hidden_states(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    shared_prefix: int = 0,
) -> Tensor:
    """Return the hidden states (B, T, H) of the last layer for ``ids`` (B, T). The head is not applied.

    Args:
        model: a causal language model.
        ids: (B, T) tokens. Pad each row on the right: with causal attention, no token then attends to padding.
        positions: (B, T) position of each token. Default: 0 .. T - 1.
        mask: (B, T, T) bool; mask[b, i, j] is true if token i of row b attends to token j. Each token must attend to
            itself. Default: causal attention.
        shared_prefix: number of first tokens, less than T, that are equal in all rows and are computed once. A number
            above 0 needs the default positions and mask, and a model for which :func:`supports_tree_mask` is true.
    """
    if shared_prefix:
        return _states_after_prefix(backbone_of(model), ids, shared_prefix)
    return backbone_states(backbone_of(model), ids, positions, mask)


def common_prefix(ids: Tensor) -> int:
    """Return the number of first tokens that are equal in all rows of ``ids`` (B, T), at most T - 1.

    Return 0 if there is one row, or if fewer than ``MIN_SHARED_PREFIX`` tokens are equal.
    """
    differs = (ids != ids[:1]).any(0)  # (T,)
    differs[-1] = True
    count = int(differs.int().argmax())
    return count if len(ids) > 1 and count >= MIN_SHARED_PREFIX else 0


def _states_after_prefix(backbone: PreTrainedModel, ids: Tensor, shared: int) -> Tensor:
    """Return the hidden states (B, T, H) of ``ids`` (B, T), whose first ``shared`` tokens are equal in all rows.

    The first pass computes keys and values of the shared tokens. In the second pass, all rows attend to these keys and
    values. So the gradient of the shared tokens is the sum over the rows.
    """
    cache = DynamicCache()
    prefix = backbone(input_ids=ids[:1, :shared], past_key_values=cache, use_cache=True).last_hidden_state  # (1, S, H)
    cache.batch_repeat_interleave(len(ids))
    rest = backbone(input_ids=ids[:, shared:], past_key_values=cache, use_cache=True).last_hidden_state  # (B, T-S, H)
    return torch.cat([prefix.expand(len(ids), -1, -1), rest], dim=1)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head."""
    return cast(PreTrainedModel, model.base_model)


def backbone_states(
    backbone: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """Return the hidden states as :func:`hidden_states` does, for a model without a head.

    ``ids``, ``positions`` and ``mask`` are as in :func:`hidden_states`. ``added`` (B, T, H) is added to the token
    embeddings.
    """
    additive = None
    if mask is not None:
        dtype = next(backbone.parameters()).dtype
        # Eager attention takes additive masks, SDPA takes boolean or additive masks: an additive mask works for both.
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        additive = additive.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
    read = {"input_ids": ids} if added is None else {"inputs_embeds": backbone.get_input_embeddings()(ids) + added}
    return backbone(**read, position_ids=positions, attention_mask=additive, use_cache=False).last_hidden_state


def token_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (N,) of the target tokens, each given the hidden state that predicts the token.

    ``hidden`` has the shape (N, H), and ``targets`` has the shape (N,).

    A log-probability is log-softmax(logits / temperature) over the full vocabulary, in fp32 or a more precise type. The
    head of ``model`` computes the logits.

    More than ``LOGITS_PER_CHUNK`` logits are computed in chunks, so that only one chunk is in memory. The backward pass
    computes each chunk again.
    """
    return token_scores(model, hidden, targets, temperature)[0]


def token_scores(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the targets, entropies) for N positions.

    ``hidden`` (N, H) holds the hidden state that predicts the token at each position. ``targets`` holds one token per
    position (N,), or m tokens per position (N, m). The log-probabilities are computed as in :func:`token_logprobs`, and
    have the shape of ``targets``.

    The entropies (N,) are in nats. They have a gradient only if ``entropy_gradient`` is true. This gradient needs
    memory for one more tensor of the size of the logits.
    """
    head = model.get_output_embeddings()
    size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    if len(targets) <= size:
        return _scores(head, hidden, targets, temperature, entropy_gradient)
    parts = [
        checkpoint(_scores, head, states, tokens, temperature, entropy_gradient, use_reentrant=False)
        for states, tokens in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    table = _log_softmax(head, hidden, temperature)  # (N, V)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        finite = table.clamp(min=torch.finfo(table.dtype).min)  # p log p of an excluded token: 0, not 0 * -inf
        entropy = -(table.exp() * finite).sum(-1)
    return table.gather(-1, targets if targets.dim() == 2 else targets[:, None]).view_as(targets), entropy


def _log_softmax(head: nn.Module, hidden: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of all tokens: (N, V), in fp32 or a more precise type."""
    logits = head(hidden)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


@torch.no_grad()
def top_tokens(
    model: PreTrainedModel, hidden: Tensor, count: int, temperature: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens, log-probabilities) of the k most likely tokens after each hidden state.

    ``hidden`` has the shape (N, H), and both results have the shape (N, k). k is ``count``, but at most the number of
    possible tokens. The logits are computed in chunks, as in :func:`token_logprobs`, and have no gradient.

    Only tokens with an id below ``vocabulary`` are returned. With the vocabulary size of another model, all returned
    tokens exist in the other model too.
    """
    head = model.get_output_embeddings()
    size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
    count = min(count, vocabulary, head.weight.shape[0])
    tables = (_log_softmax(head, states, temperature)[:, :vocabulary] for states in hidden.split(size))
    parts = [table.topk(count, -1) for table in tables]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


@torch.no_grad()
def supports_tree_mask(model: PreTrainedModel) -> bool:
    """Return whether the attention mask alone determines which tokens the model attends to.

    With such a model, several branches of a trajectory can share their common prefix in one training sequence.
    The result is False for models with sliding windows or recurrent layers.

    The function tests the model on a prefix of two tokens with two branches of one token each. The hidden state of the
    second branch must be the same with and without the first branch.
    """
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return False  # the test below is shorter than the window
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 2]], device=model.device)
    mask = torch.ones(1, 4, 4, dtype=torch.bool, device=model.device).tril()
    mask[0, 3, 2] = False
    try:
        shared = hidden_states(model, ids, positions, mask)[0, 3]
    except (TypeError, ValueError, RuntimeError):  # the backbone does not accept the mask or the positions
        return False
    alone = hidden_states(model, ids[:, [0, 1, 3]])[0, 2]
    difference = (shared - alone).abs().max() / alone.abs().max()
    return bool(difference <= 32 * torch.finfo(shared.dtype).eps)
