"""The critic: a value model that predicts, at each position of a sequence, the sum of the future rewards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.model.adapter import copy_sharing_frozen
from agent_r1.model.forward import PrefixStates, backbone_of, backbone_states

LOGPROB_SCALE = 0.25
"""Factor on the log-probabilities that the critic reads, so that most inputs are between -1 and 0."""


class ValueModel(nn.Module):
    """A backbone with a linear head that predicts one value for each token.

    The weights of the head are initialized to 0, so all values are 0 before the first update. Random weights would add
    noise to the first update of PPO.

    If ``reads_logprobs`` is true, the model also reads the log-probability with which each token was sampled. A linear
    layer converts this log-probability to a vector, which is added to the token's embedding.
    """

    def __init__(self, backbone: PreTrainedModel, width: int, reads_logprobs: bool = False) -> None:
        super().__init__()
        weight = next(backbone.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.backbone = backbone
        self.head = nn.Linear(width, 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.logprob_input: nn.Linear | None = None
        if reads_logprobs:
            embedding = next(backbone.get_input_embeddings().parameters())  # (V, H)
            dtype = torch.promote_types(embedding.dtype, torch.float32)
            self.logprob_input = nn.Linear(2, embedding.shape[1], False, device=embedding.device, dtype=dtype)
            nn.init.normal_(self.logprob_input.weight, std=float(embedding.detach().float().std()))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        logprobs: Tensor | None = None,
        prefix: PrefixStates | None = None,
    ) -> Tensor:
        """Return the values (B, T), one for each position of each sequence.

        The value at position t is the predicted sum of the rewards after position t. The prediction uses the tokens up
        to and including position t.

        For ``ids``, ``positions``, ``mask`` and ``prefix``, see :func:`agent_r1.model.forward.hidden_states`.
        ``logprobs`` (B, T) are the log-probabilities with which the tokens were sampled; 0 for tokens that were not
        sampled.
        """
        added = None
        if self.logprob_input is not None and logprobs is not None:
            surprise = torch.stack([LOGPROB_SCALE * logprobs, 1 - logprobs.exp()], dim=-1)  # (B, T, 2)
            added = self.logprob_input(surprise.to(self.logprob_input.weight.dtype))  # (B, T, H)
        hidden = backbone_states(self.backbone, ids, positions, mask, added, prefix)
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def build_value_model(policy: PreTrainedModel, reads_logprobs: bool = False) -> ValueModel:
    """Return a value model whose backbone is a copy of the policy's backbone.

    If the policy has an adapter, the value model gets an adapter of its own, and shares the frozen weights with the
    policy. For ``reads_logprobs``, see :class:`ValueModel`.
    """
    width = policy.get_output_embeddings().weight.shape[-1]
    return ValueModel(copy_sharing_frozen(backbone_of(policy)), width, reads_logprobs).eval()
