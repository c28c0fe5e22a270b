"""Settings of ``agent-r1 train-reward``. This module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.core.inference import Dtype

Kind = Literal["trajectory", "turns", "implicit"]

ImplicitReward = Literal["probability", "log_ratio"]
"""The reward of turn k from an implicit reward model. S_k is the sum of the scores of turns 1 to k.

- probability: sigmoid(S_k) - sigmoid(S_(k-1)), or sigmoid(S_1) for the first turn. The sum over all turns is the
  predicted probability of success.
- log_ratio: S_k - S_(k-1), the score of the turn.
"""

LossName = Literal["outcome", "regression", "pairs"]


class RewardModelConfig(BaseModel):
    """Settings of ``agent-r1 train-reward``. The defaults suit a model with 0.5 billion parameters."""

    section: ClassVar[str] = "Reward model"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    out: Path
    """New folder for the reward model."""

    reward: str = ""
    """Name of the recorded reward to predict, such as em. Empty: the weighted sum of all rewards, with the weights of
    the run.
    """

    model: str = ""
    """Name or folder of the model to start from. Its vocabulary must equal the vocabularies of the models that made the
    recorded runs. Empty: the model that the first of these runs started from.
    """

    kind: Kind = "trajectory"
    """Form of the reward. trajectory: one number per attempt, from a scalar head. turns: one number per turn, from a
    scalar head. implicit: one number per turn, from the probability of the turn's action under two language models: the
    trained model, and the model before the training (PRIME, iStar).
    """

    loss: LossName = "outcome"
    """Loss of the training. outcome: cross-entropy with success or failure. regression: squared error. pairs:
    Bradley-Terry loss of two attempts in one group, one with a higher reward than the other.
    """

    success: float = 0.5
    """An attempt whose reward is above this number is a success."""

    beta: float = Field(default=0.05, gt=0)
    """Factor on log(p / p_ref) in an implicit reward model. p is the probability of a token under the trained model,
    and p_ref is the probability of the token under the model before the training.
    """

    implicit_reward: ImplicitReward = "probability"
    """Reward of a turn, if kind is implicit. probability: how much the predicted probability of success rises in this
    turn. log_ratio: beta * log(p / p_ref). p is the probability of the turn's action under the trained model, and p_ref
    is the probability of the action under the model before the training. log_ratio has no bound, so do not use
    log_ratio as the only reward of an agent: add a KL penalty or the true reward.
    """

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the tasks that are held out for the evaluation."""

    epochs: int = Field(default=2, ge=1)
    """Number of passes over the attempts for training."""

    batch_size: int = Field(default=64, ge=1)
    """Number of attempts per optimizer step. With the loss "pairs", or if the common tokens of a group are computed
    only once, a batch can be larger, because groups are not divided.
    """

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of AdamW, after a linear warm-up over the first tenth of the steps."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    max_attempts: int = Field(default=0, ge=0)
    """Approximate number of attempts for training; 0: all attempts. The number is approximate, because tasks are drawn
    at random, each with all its attempts."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one forward and backward pass, with padding."""

    dtype: Dtype = "float32"
    """Data type of forward and backward passes. The trained weights are in float32."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the model: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the held-out tasks, the order of the attempts and the bootstrap intervals."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "turns" and self.loss == "pairs":
            raise ValueError("kind turns has no pairs: turns of two attempts do not correspond; give loss outcome")
        if self.kind == "implicit" and self.loss == "regression":
            raise ValueError("kind implicit predicts log-odds: give loss outcome or pairs")
        return self
