"""The model tiny-base, which is part of this package, and default settings for its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY_BASE = "tiny-base"
TINY_BASE_FOLDER = Path(__file__).parent / "tiny_base"

TINY_BASE_RECIPE: Mapping[str, Any] = {
    "model": TINY_BASE,
    "steps": 20,
    "groups_per_step": 16,
    "group_size": 16,
    "max_tokens": 32,
    "context": 512,
    "trainer.learning_rate": 3e-4,
    "trainer.critic_learning_rate": 1e-3,
    "trainer.critic_epochs": 4,
    "trainer.critic_minibatches": 8,
    "trainer.critic_reads_logprobs": True,
    "trainer.micro_tokens": 4096,
}
"""Default settings of the task sets on which tiny-base is trained."""
