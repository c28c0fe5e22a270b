"""Settings of the trainer. Imports no torch, so that the command line starts fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TrainerConfig(BaseModel):
    """Settings of the optimizer and of memory. The defaults suit a model of 3B parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW for the policy."""

    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of AdamW for the critic, if the algorithm has one."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments, each in 0..1."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch and epoch; a trajectory is never split between them."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one forward and backward pass: bounds memory; results change by rounding only."""

    checksum_every: int = Field(default=1, ge=0)
    """Steps between checksums of the policy's weights, which prove that the engine serves the trainer's weights;
    0: never."""
