"""Settings of the health monitor. Importing them does not import torch, so that the command line stays fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.weights import Dtype


class MonitorConfig(BaseModel):
    """Limits at which a run gets a warning or is stopped."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    failure_share: float = Field(default=0.5, gt=0, le=1)
    """Stop the run if more than this share of recent attempts failed, or all recent calls of a tool; 1: never."""

    failure_window: int = Field(default=256, ge=1)
    """Number of recent attempts considered, at most three steps of them. It should span a dozen groups."""

    patience: int = Field(default=3, ge=1)
    """Stop the run if a metric exceeds its limit in this many consecutive steps; warn before."""

    idle_steps: int = Field(default=20, ge=1)
    """Stop the run if nothing was learned in this many consecutive steps; warn before. A run that has no more steps
    than this is only warned."""

    ratio_deviation: float | None = Field(default=None, gt=0)
    """Limit of abs(ratio - 1) of a token before any update, in batches sampled with the newest weights. None: 0.001, or
    1 if the trainer computes in bfloat16."""

    logprob_gap: float | None = Field(default=None, gt=0)
    """Limit of the difference between a token's log-probabilities in engine and trainer, in such batches. None: 0.01,
    or 1 if one of them computes in bfloat16."""

    gradient_spike: float = Field(default=10.0, gt=1)
    """Warn if a gradient norm exceeds this many times the median of the last twenty."""

    critic_steps: int = Field(default=10, ge=1)
    """Warn if the critic explained nothing in this many consecutive steps: less than 5 % of the variance of returns."""

    def ratio_limit(self, trainer: Dtype) -> float:
        """Return the limit of the ratio's deviation for a trainer that computes in ``trainer``."""
        return self.ratio_deviation or (1e-3 if trainer == "float32" else 1.0)

    def gap_limit(self, trainer: Dtype, engine: Dtype) -> float:
        """Return the limit of the difference of log-probabilities for these data types."""
        return self.logprob_gap or (1e-2 if trainer == engine == "float32" else 1.0)
