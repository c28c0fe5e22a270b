"""Settings of ``agent-r1 train-critic``. Importing this module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class CriticConfig(BaseModel):
    """Settings of the training of a critic on the recorded attempts of a run."""

    section: ClassVar[str] = "Critic"

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    run: str
    """Run whose attempts the critic learns from: a name in runs/, or a folder."""

    out: Path | None = None
    """Folder for the critic. An old critic in this folder is replaced. Empty: the subfolder "critic" of the run."""

    model: str = ""
    """Model that the critic starts from. Empty: the final model of the run that made the attempts, or the newest
    checkpoint if the run has no final model."""

    attempts: int = Field(default=0, ge=0)
    """Number of newest attempts to learn from; 0: all. The policy that the critic will guide should have made
    these attempts."""

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of tasks that the critic is not trained on. The attempts at these tasks measure the critic."""

    epochs: int = Field(default=4, ge=1)
    """Passes over the attempts."""

    batch_size: int = Field(default=32, ge=1)
    """Attempts per optimizer step."""

    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Learning rate of AdamW at the first step. The rate falls linearly to 0."""

    reads_logprobs: bool = True
    """Whether the critic also reads the log-probability of each sampled token."""

    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    """Seed of the held-out tasks and of the order of the attempts."""

    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the critic: auto (a GPU if there is one), cpu, cuda, cuda:N."""

    threads: int = Field(default=1, ge=1, le=256)
    """Number of torch threads."""
