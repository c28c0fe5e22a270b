"""The algorithms there are, by name, and how their numbers and parts are changed."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import critics, groups, returns, turns

ALGORITHMS: Mapping[str, Algorithm] = {
    row.name: row
    for row in (
        groups.GRPO,
        critics.PPO,
        critics.PPO_TURN,
        critics.STEPPO,
        critics.TURN_PPO,
        critics.VAPO,
        critics.BI_LEVEL,
        returns.REINFORCE,
        returns.REINFORCE_PLUS_PLUS,
        groups.REINFORCE_PLUS_PLUS_BASELINE,
        groups.RLOO,
        groups.REMAX,
        groups.DR_GRPO,
        groups.DAPO,
        groups.GSPO,
        groups.CISPO,
        groups.SAPO,
        groups.TOPR,
        groups.DPPO,
        groups.AIPO,
        groups.GMPO,
        groups.MAXRL,
        groups.OPO,
        groups.LITE_PPO,
        groups.GDPO,
        turns.GIGPO,
        turns.HGPO,
        turns.PROCESS_GRPO,
        turns.MT_GRPO,
        turns.GTPO,
        returns.REJECTION_FINE_TUNING,
        returns.DISTILLATION,
        returns.ECHO,
    )
}
