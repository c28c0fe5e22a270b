"""The model tiny-base, which is part of this package, and default settings for its training."""

from __future__ import annotations

import json
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


def is_tiny_base(model: str) -> bool:
    """Return whether ``model`` is tiny-base ("" too), or the folder of a model that was trained from it."""
    if model in ("", TINY_BASE):
        return True
    try:  # of the same shape, wherever its folder was copied to
        own, found = (json.loads((folder / "config.json").read_bytes()) for folder in (TINY_BASE_FOLDER, Path(model)))
    except (OSError, ValueError):
        return False
    return bool(own | {"transformers_version": ""} == found | {"transformers_version": ""})
