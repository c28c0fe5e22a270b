"""A separate value model: how much reward is still to come, at each position."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.model.forward import backbone_states


class ValueModel(nn.Module):
    """A backbone and a linear head to one number. The head starts at zero: every first value is 0.

    A zero head makes PPO's first update a plain policy gradient, instead of one against noise.
    """

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        dtype = torch.promote_types(next(backbone.parameters()).dtype, torch.float32)
        self.backbone = backbone
        self.head = nn.Linear(width, 1, dtype=dtype, device=next(backbone.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, T) -> the value (B, T) of the state that ends with each token; arguments as ``hidden_states``."""
        hidden = backbone_states(self.backbone, ids, positions, mask)
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def value_model(policy: PreTrainedModel) -> ValueModel:
    """A value model whose backbone is a copy of the policy's, so that it reads what the policy reads."""
    return ValueModel(copy.deepcopy(policy.base_model), policy.get_output_embeddings().weight.shape[-1]).eval()
