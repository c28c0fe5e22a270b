"""Algorithms as data: each algorithm consists of an advantage estimator, a policy loss and optional terms.

``ALGORITHMS`` holds the algorithms with a name (presets). The methods of ``Algorithm`` compute the loss.
"""

from agent_r1.algorithms.advantages.advantage import Advantage
from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Component
from agent_r1.algorithms.loss_terms import Correction, Distillation, Kl, Masks, Rejection
from agent_r1.algorithms.policy_losses import Clip, PolicyLoss
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.shaping import Filters, RewardShaping
from agent_r1.algorithms.types import ModelOutputs, StateValues, TokenOutputs, TokenWeights, TopTokens, ValueTargets
from agent_r1.algorithms.validation import check_algorithm

__all__ = [
    "ALGORITHMS",
    "Advantage",
    "Algorithm",
    "Clip",
    "Component",
    "Correction",
    "Distillation",
    "Filters",
    "Kl",
    "Masks",
    "ModelOutputs",
    "PolicyLoss",
    "Rejection",
    "RewardShaping",
    "StateValues",
    "TokenOutputs",
    "TokenWeights",
    "TopTokens",
    "ValueTargets",
    "WithCritic",
    "check_algorithm",
]
