"""Bounds of a healthy run. Free of torch, so that doors stay fast."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DoctorConfig(BaseModel):
    """Where a run is warned of, and stopped. Defaults are for float32."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    failure_share: float = Field(default=0.5, gt=0, le=1)
    """A run stops where more than this share of its last attempts failed, or all calls of a tool; 1: never."""

    failure_window: int = Field(default=256, ge=1)
    """Attempts that this looks back on, at most those of three steps. It should hold a dozen groups."""

    patience: int = Field(default=3, ge=1)
    """A run stops where a number is out of its bound for so many steps in a row; before, that is a warning."""

    idle_steps: int = Field(default=20, ge=1)
    """A run stops where nothing was learned in so many steps in a row, or in all it has; before, that is a warning."""

    ratio_deviation: float = Field(default=1e-3, gt=0)
    """Largest abs(ratio - 1) of a token before any weight moved, in batches of the newest weights."""

    logprob_gap: float = Field(default=1e-2, gt=0)
    """Largest difference between a token's log-probability by the engine and by the learner, in such batches."""

    gradient_spike: float = Field(default=10.0, gt=1)
    """Warned of is a gradient norm above so many times the median of the last twenty."""
