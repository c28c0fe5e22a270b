"""The critic: a value model that predicts the reward still to come, at each position."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_r1.model.forward import backbone_states


class ValueModel(nn.Module):
    """A backbone with a linear head to one number. The head is initialized to zero, so all values are 0 at first.

    The baseline of PPO's first update is then 0 instead of noise.
    """

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        dtype = torch.promote_types(next(backbone.parameters()).dtype, torch.float32)
        self.backbone = backbone
        self.head = nn.Linear(width, 1, dtype=dtype, device=next(backbone.parameters()).device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the values (B, T) of the states that end with each token; arguments as in ``hidden_states``."""
        hidden = backbone_states(self.backbone, ids, positions, mask)
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def build_value_model(policy: PreTrainedModel) -> ValueModel:
    """Return a value model whose backbone is a copy of the policy's."""
    return ValueModel(copy.deepcopy(policy.base_model), policy.get_output_embeddings().weight.shape[-1]).eval()
