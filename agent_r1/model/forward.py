"""Hidden states of any causal language model, and log-probabilities of chosen tokens from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 26
"""How many logits are held at one time (256 MiB in fp32), whatever the number of tokens and the vocabulary."""


def hidden_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The model's last hidden states, without its head: tokens (B, T) -> (B, T, H).

    Without ``mask`` attention is causal; rows are then padded on the right, where no real token sees
    the padding. ``mask`` (B, T, T), true where a row's token may see a column's, replaces that; each
    token must see itself. ``positions`` (B, T) default to 0..T-1.
    """
    return backbone_states(model.base_model, ids, positions, mask)


def backbone_states(
    backbone: nn.Module, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """As :func:`hidden_states`, of a model that has no head."""
    additive = None
    if mask is not None:
        dtype = next(backbone.parameters()).dtype
        # eager attention adds its mask to the scores, SDPA takes either kind: the additive form suits both
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        additive = additive.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
    return backbone(input_ids=ids, position_ids=positions, attention_mask=additive, use_cache=False).last_hidden_state


def token_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probability (N,) of each target token given the hidden state (N, H) that predicts it.

    It is log-softmax(logits / temperature) over the full vocabulary, in fp32 at least. Memory stays
    bounded for any N and vocabulary: logits are made in chunks, again in the backward pass.
    """
    return token_scores(model, hidden, targets, temperature)[0]


def token_scores(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`token_logprobs` (N,), and the entropy (N,) in nats of the same distributions.

    The entropy has a gradient where that is asked for: it keeps one more table of logits in memory.
    """
    head = model.get_output_embeddings()
    size = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    if len(targets) <= size:
        return _scores(head, hidden, targets, temperature, entropy_gradient)
    parts = [
        checkpoint(_scores, head, states, wanted, temperature, entropy_gradient, use_reentrant=False)
        for states, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    table = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        finite = table.clamp(min=torch.finfo(table.dtype).min)  # a token ruled out counts 0, not 0 * infinity
        entropy = -(table.exp() * finite).sum(-1)
    return table.gather(-1, targets[:, None]).squeeze(-1), entropy


@torch.no_grad()
def obeys_tree_mask(model: PreTrainedModel) -> bool:
    """Whether a mask alone decides what each token sees, so that branches can share a prefix.

    False for sliding windows and recurrent layers. Shown on a prefix of two tokens with two branches
    of one token each: the second branch must come out as if the first were not there.
    """
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return False  # a window longer than the probe would go unseen
    ids = torch.tensor([[0, 1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 2]], device=model.device)
    mask = torch.ones(1, 4, 4, dtype=torch.bool, device=model.device).tril()
    mask[0, 3, 2] = False
    try:
        shared = hidden_states(model, ids, positions, mask)[0, 3]
    except (TypeError, ValueError, RuntimeError):  # a backbone that takes no such mask or positions
        return False
    alone = hidden_states(model, ids[:, [0, 1, 3]])[0, 2]
    difference = (shared - alone).abs().max() / alone.abs().max()
    return bool(difference <= 32 * torch.finfo(shared.dtype).eps)
