"""Hidden states of any causal language model, and log-probabilities of target tokens from them.

Shapes: B rows, T tokens, H hidden size, N target tokens, V vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

LOGITS_PER_CHUNK = 1 << 26
"""Most logits that are in memory at one time (256 MiB in fp32)."""


def hidden_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the last hidden states (B, T, H) of tokens (B, T), without the head.

    Args:
        model: a causal language model.
        ids: tokens. Pad them on the right: causal attention then never sees the padding.
        positions: (B, T), 0 .. T - 1 by default.
        mask: (B, T, T), true if the token of the row attends to the token of the column; each token must attend to
            itself. Causal attention by default.
    """
    return backbone_states(backbone_of(model), ids, positions, mask)


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
    """Return :func:`hidden_states` for a model without a head; ``added`` (B, T, H) is added to the embeddings."""
    additive = None
    if mask is not None:
        dtype = next(backbone.parameters()).dtype
        # Eager attention adds the mask to the scores, SDPA takes boolean or additive masks: additive works for both.
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        additive = additive.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
    read = {"input_ids": ids} if added is None else {"inputs_embeds": backbone.get_input_embeddings()(ids) + added}
    return backbone(**read, position_ids=positions, attention_mask=additive, use_cache=False).last_hidden_state


def token_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the log-probability (N,) of each target token (N,) given the hidden state (N, H) that predicts it.

    It is log-softmax(logits / temperature) over the full vocabulary, in at least fp32. Logits are computed in chunks,
    and again in the backward pass, so that memory stays bounded for every N and V.
    """
    return token_scores(model, hidden, targets, temperature)[0]


def token_scores(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return :func:`token_logprobs` (N,) and the entropy (N,), in nats, of the same distributions.

    With ``entropy_gradient`` the entropy has a gradient, which keeps one more table of logits in memory.
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
    logits = head(hidden)  # (N, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    table = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        finite = table.clamp(min=torch.finfo(table.dtype).min)  # p log p is 0 for an excluded token, not 0 * inf
        entropy = -(table.exp() * finite).sum(-1)
    return table.gather(-1, targets[:, None]).squeeze(-1), entropy


@torch.no_grad()
def supports_tree_mask(model: PreTrainedModel) -> bool:
    """Return whether the mask alone decides what each token attends to, so that branches can share a prefix.

    False for sliding windows and recurrent layers. Tested on a prefix of two tokens with two branches of one token
    each: the second branch must get the same hidden state as without the first.
    """
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return False  # the probe is shorter than the window
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 2]], device=model.device)
    mask = torch.ones(1, 4, 4, dtype=torch.bool, device=model.device).tril()
    mask[0, 3, 2] = False
    try:
        shared = hidden_states(model, ids, positions, mask)[0, 3]
    except (TypeError, ValueError, RuntimeError):  # the backbone takes no such mask or positions
        return False
    alone = hidden_states(model, ids[:, [0, 1, 3]])[0, 2]
    difference = (shared - alone).abs().max() / alone.abs().max()
    return bool(difference <= 32 * torch.finfo(shared.dtype).eps)
