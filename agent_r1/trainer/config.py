"""Settings of the trainer. This module does not import torch, so that the command line starts fast."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.core.errors import InvalidInput
from agent_r1.core.inference import Dtype
from agent_r1.model.config import LoraConfig

DecayRate = Annotated[float, Field(ge=0, lt=1)]

OptimizerName = Literal["adamw", "adamw-8bit"]


class ScheduleConfig(BaseModel):
    """The schedule of the learning rates over the steps of a run: warm-up, plateau, decay."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    name: Literal["constant", "linear", "cosine", "1-sqrt"] = "constant"
    """Curve by which the learning rates decrease until the last step of the run. constant: no decay."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps of the warm-up: the steps at the start of the run in which the learning rates rise linearly. For
    example, 4 steps have 1/4, 2/4, 3/4 and 4/4 of the configured learning rates. If min_ratio is above 0, the learning
    rates rise from a higher start."""

    decay_ratio: float | None = Field(default=None, gt=0, le=1)
    """Length of the decay at the end of the run, as a share of all steps. Between warm-up and decay, the learning rates
    are constant. None: the decay begins right after the warm-up."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at which the warm-up begins and the decay ends, as a share of the configured learning rate."""

    steps: int | None = Field(default=None, ge=1)
    """Number of steps over which the curve extends; later steps have its last learning rate. None: all steps of the
    run. A resumed run that gets more steps keeps its old curve with its old number of steps."""

    def total(self, steps: int) -> int:
        """Return the number of steps over which the curve of a run of ``steps`` steps extends."""
        return steps if self.steps is None else self.steps

    def lengths(self, steps: int) -> tuple[int, int]:
        """Return (steps of the warm-up, steps of the decay) for a run of ``steps`` steps."""
        steps = self.total(steps)
        decay = steps - self.warmup_steps if self.decay_ratio is None else round(self.decay_ratio * steps)
        return self.warmup_steps, decay

    def check_steps(self, steps: int) -> None:
        """Raise InvalidInput if warm-up and decay do not fit in a run of ``steps`` steps."""
        warmup, decay = self.lengths(steps)
        steps = self.total(steps)
        do = ""
        if warmup >= steps:
            do = f"give more steps, or a shorter warm-up in trainer.schedule: it has {warmup} steps"
        elif self.name != "constant" and warmup + decay > steps:
            lengths = f"{warmup} steps of warm-up and {decay} of decay"
            do = f"give more steps, or a smaller trainer.schedule.decay_ratio: there are {lengths}"
        elif self.decay_ratio is not None and decay < 2:  # the first step of a decay has the full learning rates
            do = f"give more steps, or a larger trainer.schedule.decay_ratio: the decay has no effect in {decay} steps"
        if do:
            raise InvalidInput("steps", got=steps, do=do)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "constant" and (self.min_ratio or self.decay_ratio is not None):
            raise ValueError("min_ratio and decay_ratio have no effect with a constant schedule: name a decay")
        return self


class TrainerConfig(BaseModel):
    """Settings of the optimizer and of the memory for training. The defaults suit a model with 3 billion parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Learning rate of AdamW for the policy."""

    critic_learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of AdamW for the critic."""

    critic_epochs: int | None = Field(default=None, ge=1)
    """Number of epochs over each batch that train only the critic, after the epochs of the policy. None: the critic is
    trained in the epochs of the policy."""

    critic_minibatches: int = Field(default=1, ge=1)
    """Number of minibatches into which each batch is divided in an epoch that trains only the critic (see
    critic_epochs). A value above 1 needs critic_epochs."""

    critic_reads_logprobs: bool = False
    """Whether the critic also reads the log-probability with which each token was sampled. If improbable
    tokens decide the outcome, such a critic needs far fewer attempts to learn."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Schedule of the learning rates over the steps of a run."""

    optimizer: OptimizerName = "adamw"
    """Optimizer. adamw-8bit keeps AdamW's moments in 8 bits: 2 bytes per weight instead of 8. It needs the extra
    agent-r1[8bit], and is slow on a CPU: about 0.3 seconds per million weights in each step."""

    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient of the policy or of the critic. A larger gradient is scaled down to this norm."""

    minibatches: int = Field(default=1, ge=1)
    """Number of minibatches into which each batch is divided. An epoch has one optimizer step per minibatch. A
    trajectory is never divided, so there are at most as many minibatches as trajectories."""

    ranks: int = Field(default=1, ge=1, le=1024)
    """Number of ranks: processes among which FSDP2 divides weights, gradients, moments and sequences. Each rank uses
    one GPU or one CPU core. 1: training runs in the process of the run."""

    rank_restarts: int = Field(default=2, ge=0)
    """Maximum number of times that all ranks are started again because the process of a rank ended. The run then
    continues from its last checkpoint. No effect with one rank."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one forward and backward pass, with padding. A longer sequence is a pass of its own.
    A smaller number needs less memory, and changes the results only by rounding errors."""

    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """Whether the tokens with which several attempts begin (for example the system prompt) are computed only once per
    update. This changes results only by rounding errors. auto: on if the models support it, have at least 0.1
    million parameters, and train in one process."""

    lora: LoraConfig = LoraConfig()
    """LoRA: an adapter is trained instead of all weights. LoRA needs the extra agent-r1[lora]."""

    dtype: Dtype = "float32"
    """Data type of forward and backward passes, and of the weights that LoRA freezes. Trained weights, their gradients
    and the optimizer's moments are always in float32."""

    activation_checkpointing: bool = False
    """Whether the backward pass computes activations again, instead of reading them from memory. Training then needs
    less memory and about a third more time. A run that would not fit otherwise does so by itself."""

    checksum_every: int = Field(default=1, ge=0)
    """Number of steps from one checksum of the policy's weights to the next. A checksum proves that the engine serves
    the trainer's weights. 0: no checksums."""

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if self.critic_minibatches > 1 and self.critic_epochs is None:
            raise ValueError("critic_minibatches has no effect in the policy's passes: give critic_epochs too")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.ranks > 1 and self.share_prefixes == "on":
            raise ValueError("several ranks share no prefixes: leave share_prefixes out, or give trainer.ranks 1")
        if self.ranks > 1 and self.optimizer == "adamw-8bit":
            raise ValueError("adamw-8bit runs in one process: give optimizer adamw, or trainer.ranks 1")
        return self
