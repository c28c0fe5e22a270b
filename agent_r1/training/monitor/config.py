"""Settings of the health monitor. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.weights import ProductPrecision

RATIO_LIMITS: Mapping[ProductPrecision, float] = {"float32": 1e-3, "tf32": 0.01, "bfloat16": 1.0}
GAP_LIMITS: Mapping[ProductPrecision, float] = {"float32": 1e-2, "tf32": 0.5, "bfloat16": 1.0}


class MonitorConfig(BaseModel):
    """Limits of the health checks. Beyond a limit, the monitor warns or stops the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    failure_share: float = Field(default=0.5, gt=0, le=1)
    """Stop the run if more than this share of the recent attempts failed, or if a tool always fails for the same cause.
    1: stop in neither case."""

    failure_window: int = Field(default=256, ge=1)
    """Number of recent attempts in which failures are counted (see failure_share). A good value is the number of
    attempts in about twelve groups. The monitor counts failures in at most as many attempts as three training steps
    have, but in at least 32 attempts or the attempts of four groups, whichever are fewer."""

    patience: int = Field(default=3, ge=1)
    """Stop the run if a metric exceeds its limit in this many consecutive steps. In all of these steps except the last,
    only warn."""

    idle_steps: int = Field(default=20, ge=1)
    """Stop the run after this many consecutive steps in which no attempt was trained. Each such step gives a warning.
    If the run's total number of steps is at most this number, the run only gets the warnings."""

    ratio_deviation: float | None = Field(default=None, gt=0)
    """Limit of abs(importance ratio - 1) before an update, for tokens sampled with the newest weights. None: the limit
    is 0.001 if the trainer computes in float32, 0.01 in TF32, and 1 in bfloat16."""

    logprob_gap: float | None = Field(default=None, gt=0)
    """Limit of the difference between a token's log-probabilities in engine and trainer, for tokens sampled with the
    newest weights. None: the limit is 0.01 if engine and trainer compute in float32, 0.5 if one computes in TF32, and 1
    if one computes in bfloat16."""

    gradient_spike: float = Field(default=10.0, gt=1)
    """Warn if the gradient norm exceeds this multiple of the median of the last 20 gradient norms."""

    entropy_share: float = Field(default=0.1, ge=0, lt=1)
    """Warn if the policy's entropy is below a limit in each of 5 consecutive steps. The limit is this share of the mean
    entropy in the first 5 steps of the run."""

    constant_share: float = Field(default=0.9, ge=0, le=1)
    """Warn if the share of constant groups is above this number in each of 5 consecutive steps. In a constant group,
    all attempts have equal rewards."""

    critic_steps: int = Field(default=10, ge=1)
    """Warn if the critic explained less than 5 % of the variance of the returns in this many consecutive steps."""

    true_reward: str = ""
    """Name of the true reward, which measures the real goal of the run. Warn if the true reward falls while the reward
    on which the run trains rises. Empty: no check. Example: a run trains on a reward model, and the true reward is em
    (exact match)."""

    true_reward_steps: int = Field(default=5, ge=2)
    """Number of steps in a period. The check of the true reward compares two periods of equal length. One period
    consists of the last steps. The other period consists of the earlier consecutive steps with the highest mean true
    reward."""

    def ratio_limit(self, trainer: ProductPrecision) -> float:
        """Return the limit of abs(importance ratio - 1).

        The limit is ``ratio_deviation``. If ``ratio_deviation`` is None, the limit depends on the argument ``trainer``,
        which is the precision in which the trainer computes.
        """
        return self.ratio_deviation or RATIO_LIMITS[trainer]

    def gap_limit(self, trainer: ProductPrecision, engine: ProductPrecision) -> float:
        """Return the limit of the difference between a token's log-probabilities in engine and trainer.

        The limit is ``logprob_gap``. If ``logprob_gap`` is None, the limit depends on the arguments ``trainer`` and
        ``engine``, which are the precisions in which the trainer and the engine compute.
        """
        return self.logprob_gap or max(GAP_LIMITS[trainer], GAP_LIMITS[engine])
