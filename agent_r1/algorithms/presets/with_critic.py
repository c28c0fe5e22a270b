"""Presets with a critic."""

from __future__ import annotations

from agent_r1.algorithms.advantages.critics import BiLevelGae, LengthAdaptiveGae, TokenGae, TurnGae
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip

PPO = Algorithm(
    name="ppo",
    paper="1707.06347",
    deviations="no entropy bonus; value clip 0.5; dual clip 3, as in verl",
    advantage=TokenGae(),
)
PPO_TURN = Algorithm(
    name="ppo-turn",
    paper="2511.14460",
    deviations="the critic has a target at the first token of each turn only, while Agent-R1 regresses every token "
    "of the turn on it; dual clip 3, as in verl",
    advantage=TurnGae(),
)
STEPPO = Algorithm(
    name="steppo",
    paper="2604.18401",
    deviations="clip bounds of GSPO's paper, as the recipe gives none; no running scale of rewards; the critic has "
    "a target at the first token of each turn only, while Agent-R1 regresses every token of it",
    advantage=TurnGae(gamma=0.99),
    loss=Clip(clip_low=3e-4, clip_high=4e-4, dual_clip=None),
    ratio_level="turn",
    aggregation="turn_mean",
)
TURN_PPO = Algorithm(
    name="turn-ppo",
    paper="2512.17008",
    deviations="the critic has a target at the first token of each turn only, while Agent-R1 regresses every token "
    "of it; dual clip 3, as in verl",
    advantage=TurnGae(gamma=0.99, lam=0.9),
    ratio_level="turn",
    aggregation="turn_mean",
)
VAPO = Algorithm(
    name="vapo",
    paper="2504.05118",
    deviations="the critic is warmed up in the first updates of the run, not before it",
    advantage=LengthAdaptiveGae(warmup=2),
    loss=Clip(clip_high=0.28, dual_clip=None),
    sft_coef=0.1,
)
BI_LEVEL = Algorithm(
    name="bi-level-gae",
    paper="2510.16907",
    deviations="turns are recorded, not inferred from rewards; a turn's value is that before its first token, not "
    "at its last; one lambda for both levels; dual clip 3, as in verl",
    advantage=BiLevelGae(),
    loss=Clip(clip_high=0.28),
)
