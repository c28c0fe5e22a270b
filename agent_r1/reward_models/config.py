"""Settings of ``agent-r1 train-reward``. Importing this module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agent_r1.core.weights import Dtype

Kind = Literal["trajectory", "turns", "implicit"]
"""What a reward model predicts.

- trajectory: one number for the whole trace (attempt), computed by a scalar head at the last token.
- turns: one number after each turn, computed by a scalar head: the value of the trace up to this turn.
- implicit: one score for each turn, without a head: beta * log(pi / pi_ref), summed over the tokens of the action. The
  score of the trace is the sum over its turns.
"""

ImplicitReward = Literal["probability", "log_ratio"]
"""The reward of a turn from an implicit reward model.

S_k is the sum of beta * log(pi / pi_ref) over the action tokens of turns 1 to k, and sigma is the logistic function.

- probability: sigma(S_k) - sigma(S_(k-1)), and sigma(S_1) for the first turn. The sum over all turns is the predicted
  probability of success, which is between 0 and 1.
- log_ratio: S_k - S_(k-1), and S_1 for the first turn. The sum over all turns has no bound.
"""

LossName = Literal["outcome", "regression", "pairs"]
"""The loss of a reward model.

- outcome: binary cross-entropy between the prediction and success or failure.
- regression: squared error between the prediction and the recorded reward.
- pairs: the Bradley-Terry loss -log sigmoid(s+ - s-). s+ and s- are the scores of a success and a failure in one group.
"""


class RewardModelConfig(BaseModel):
    """Settings of ``agent-r1 train-reward``. The defaults suit a model with 0.5 billion parameters."""

    section: ClassVar[str] = "Reward model"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    out: Path
    """New folder for the reward model."""

    reward: str = ""
    """Name of the recorded reward to predict, such as em. Empty: the weighted sum of all rewards, with the weights of
    the run."""

    model: str = ""
    """Name or folder of the model to start from. The model must have the same vocabulary as the models of the runs.
    Empty: the model that the first run started from."""

    kind: Kind = "trajectory"
    """Form of the reward. trajectory: one number per attempt, from a scalar head at the last token. turns: one number
    per turn, from a scalar head at the end of the turn. implicit: one number per turn, from the log ratio of two
    language models (PRIME, iStar)."""

    loss: LossName = "outcome"
    """Loss of the training. outcome: cross-entropy with success or failure. regression: squared error. pairs:
    Bradley-Terry loss of the pairs of a success and a failure in one group."""

    success: float = 0.5
    """An attempt whose reward is above this number is a success."""

    beta: float = Field(default=0.05, gt=0)
    """Factor on the log ratio of an implicit reward model."""

    implicit_reward: ImplicitReward = "probability"
    """Reward of an implicit reward model. probability: how much the predicted probability of success rose in the turn.
    log_ratio: beta * log(pi / pi_ref) of the two language models, summed over the tokens of the turn's action, as in
    PRIME and iStar. This number has no bound. Do not train on an implicit reward alone: add a penalty on the KL
    divergence, or the true reward."""

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the tasks that are held out for the evaluation. No attempt at a held-out task is trained on."""

    epochs: int = Field(default=2, ge=1)
    """Number of passes over the attempts for training."""

    batch_size: int = Field(default=64, ge=1)
    """Number of attempts per optimizer step. In two cases, whole groups are added to a batch until it has at least this
    number of attempts: if the loss is pairs, and if the common tokens at the beginning of several attempts are computed
    only once."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate of AdamW, after a linear warm-up over the first tenth of the steps."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""

    max_attempts: int = Field(default=0, ge=0)
    """Approximate number of attempts for training, in all runs together; 0: all attempts. Whole tasks are drawn at
    random until their attempts reach this number. Attempts at held-out tasks are not counted."""

    micro_tokens: int = Field(default=16384, ge=1)
    """Maximum number of tokens in one forward and backward pass, with padding."""

    dtype: Dtype = "float32"
    """Data type of forward and backward passes. The trained weights are always in float32."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the model: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the choice of held-out tasks, of the order of the attempts, and of the bootstrap intervals."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind == "turns" and self.loss == "pairs":
            raise ValueError("kind turns has no pairs: turns of two attempts do not correspond; give loss outcome")
        if self.kind == "implicit" and self.loss == "regression":
            raise ValueError("kind implicit predicts log-odds: give loss outcome or pairs")
        return self
