"""Settings of the trainer. Imports no torch, so that the command line starts fast."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.core.weights import Dtype

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(BaseModel):
    """How the learning rates change over the steps of a run: warm-up, plateau, decay.

    Example:
        ScheduleConfig(name="cosine", warmup_ratio=0.03, min_ratio=0.1)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: Literal["constant", "linear", "cosine", "1-sqrt"] = "constant"
    """Shape of the decay that ends with the last step; constant: none."""

    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which the learning rates rise linearly, from min_ratio in the first one."""

    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """The same as a share of all steps; give one of both."""

    decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of the steps, at the end, in which they fall (warm-up, stable, decay). None: all after the warm-up."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the decay ends, as a share of the learning rates."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio are both given: leave one out")
        if self.name == "constant" and (self.min_ratio or self.decay_ratio is not None):
            raise ValueError("min_ratio and decay_ratio have no effect with a constant schedule: name a decay")
        return self


class TrainerConfig(BaseModel):
    """Settings of the optimizer and of memory. The defaults suit a model of 3B parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Learning rate of AdamW for the policy."""

    critic_learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of AdamW for the critic, if the algorithm has one."""

    critic_epochs: int | None = Field(default=None, ge=1)
    """Passes of the critic alone over each batch, after the policy's; none: it is trained in the policy's passes."""

    critic_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps of the critic per batch and pass, if critic_epochs is given."""

    critic_reads_logprobs: bool = False
    """Whether the critic also reads the probability with which each token was sampled: where improbable tokens decide
    the outcome, it then learns from far fewer attempts."""

    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rates change over the steps."""

    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments, each at least 0 and below 1."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch and epoch; a trajectory is never split between them."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one forward and backward pass: bounds memory; results change by rounding only."""

    dtype: Dtype = "float32"
    """Data type of forward and backward passes. Weights, gradients and optimizer moments are always kept in float32."""

    activation_checkpointing: bool = False
    """Keep only the inputs of each layer in the forward pass, and compute the rest again in the backward pass: less
    memory, about a third more time."""

    checksum_every: int = Field(default=1, ge=0)
    """Steps between checksums of the policy's weights, which prove that the engine serves the trainer's weights;
    0: never."""

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if self.critic_minibatches > 1 and self.critic_epochs is None:
            raise ValueError("critic_minibatches has no effect in the policy's passes: give critic_epochs too")
        return self
