"""Reward models: transformers that score whole traces. They are trained on recorded runs, for use in other runs.

A trace is a recorded attempt. Each name of this package is imported when it is first used.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.reward_models.config import RewardModelConfig
    from agent_r1.reward_models.folder import is_reward_model, load_reward_model
    from agent_r1.reward_models.scorer import RewardModelScorer
    from agent_r1.reward_models.train import train_reward_model

__all__ = ["RewardModelConfig", "RewardModelScorer", "is_reward_model", "load_reward_model", "train_reward_model"]

__getattr__ = lazy_names(
    __name__,
    {
        "config": ("RewardModelConfig",),
        "folder": ("is_reward_model", "load_reward_model"),
        "scorer": ("RewardModelScorer",),
        "train": ("train_reward_model",),
    },
)
