"""How the learner updates: knobs of the optimizer, apart from the algorithm. Free of torch, so that doors stay fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrainerConfig(BaseModel):
    """Defaults fit a model of 3B parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size of AdamW for the policy."""

    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Step size of AdamW for the value model, where the algorithm has one."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moments, each in 0..1."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates each batch is split into, per epoch; trajectories are never split."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass; bounds memory, changes a result by rounding only."""
