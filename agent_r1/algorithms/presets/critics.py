"""Algorithms with a critic."""

from __future__ import annotations

from agent_r1.algorithms.advantages.critics import BiLevelGae, LengthAdaptiveGae, TokenGae, TurnGae
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.policy_losses import Clip

PPO = Algorithm(name="ppo", paper="1707.06347", differs="no entropy bonus; value clip 0.5", advantage=TokenGae())
PPO_TURN = Algorithm(
    name="ppo-turn",
    paper="2511.14460",
    differs="nothing: Agent-R1's second version runs PPO so",
    advantage=TurnGae(),
)
STEPPO = Algorithm(
    name="steppo",
    paper="2604.18401",
    differs="clipped as GSPO's paper does, as its recipe names no bounds; no running scale of rewards",
    advantage=TurnGae(gamma=0.99),
    surrogate=Clip(low=3e-4, high=4e-4, dual=None),
    ratio="turn",
    aggregation="turn_mean",
)
TURN_PPO = Algorithm(
    name="turn-ppo",
    paper="2512.17008",
    advantage=TurnGae(gamma=0.99, lam=0.9),
    ratio="turn",
    aggregation="turn_mean",
)
VAPO = Algorithm(
    name="vapo",
    paper="2504.05118",
    differs="the critic is warmed up in the run's first updates, not before it",
    advantage=LengthAdaptiveGae(warmup=2),
    surrogate=Clip(high=0.28, dual=None),
    imitation=0.1,
)
BI_LEVEL = Algorithm(
    name="bi-level-gae",
    paper="2510.16907",
    differs="turns are known, not guessed from rewards; a turn's value is that before its first token, not at its "
    "last; one lambda for both levels",
    advantage=BiLevelGae(),
    surrogate=Clip(high=0.28),
)
