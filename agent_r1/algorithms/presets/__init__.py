"""Algorithms with a name. The field ``deviations`` says how a preset differs from its paper."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets.group_relative import (
    AIPO,
    CISPO,
    CLIP_COV,
    DAPO,
    DPPO,
    DR_GRPO,
    FORKING_TOKENS,
    GDPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    IPO,
    KL_COV,
    LITE_PPO,
    LUSPO,
    M2PO,
    MAXRL,
    OPO,
    OPSM,
    PASS_AT_K,
    REINFORCE_PLUS_PLUS_BASELINE,
    REMAX,
    RLOO,
    SAPO,
    TOPR,
    VESPO,
)
from agent_r1.algorithms.presets.other import (
    DISTILLATION,
    ECHO,
    RAE,
    REINFORCE,
    REINFORCE_PLUS_PLUS,
    REJECTION_FINE_TUNING,
    TOP_K_DISTILLATION,
)
from agent_r1.algorithms.presets.turn_level import GIGPO, GTPO, HGPO, MT_GRPO, PROCESS_GRPO
from agent_r1.algorithms.presets.with_critic import BI_LEVEL, PPO, PPO_TURN, STEPPO, TURN_PPO, VAPO

ALGORITHMS: Mapping[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        GRPO,
        PPO,
        PPO_TURN,
        STEPPO,
        TURN_PPO,
        VAPO,
        BI_LEVEL,
        REINFORCE,
        RAE,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        RLOO,
        REMAX,
        DR_GRPO,
        DAPO,
        FORKING_TOKENS,
        CLIP_COV,
        KL_COV,
        M2PO,
        OPSM,
        GSPO,
        LUSPO,
        CISPO,
        SAPO,
        TOPR,
        DPPO,
        IPO,
        VESPO,
        AIPO,
        GMPO,
        MAXRL,
        OPO,
        LITE_PPO,
        GPG,
        PASS_AT_K,
        GDPO,
        GIGPO,
        HGPO,
        PROCESS_GRPO,
        MT_GRPO,
        GTPO,
        REJECTION_FINE_TUNING,
        DISTILLATION,
        TOP_K_DISTILLATION,
        ECHO,
    )
}
"""The presets by name."""
