"""Algorithms from returns alone: REINFORCE and its neighbours, imitation, distillation."""

from __future__ import annotations

from agent_r1.algorithms.advantages.groups import GroupRelative
from agent_r1.algorithms.advantages.returns import Success, Teacher, TokenReturns, TurnReturns
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.filters import Filters
from agent_r1.algorithms.loss_terms import Kl
from agent_r1.algorithms.ops.group_stats import CONSTANT
from agent_r1.algorithms.policy_losses import ImportanceSampling, PolicyGradient

REINFORCE = Algorithm(
    name="reinforce",
    paper="2511.14460",
    differs="nothing: Williams' estimator (1992) with turns as steps, as Agent-R1 runs it",
    advantage=TurnReturns(),
    surrogate=PolicyGradient(),
)
REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce++",
    paper="2501.03262",
    advantage=TokenReturns(),
    kl=Kl(coefficient=0.001, estimator="k1", where="reward"),
)
REJECTION_FINE_TUNING = Algorithm(
    name="rft",
    paper="2308.01825",
    differs="samples of the present policy, once each; no removal of duplicates",
    advantage=Success(),
    surrogate=PolicyGradient(),
    filters=Filters(success=1.0),
)
DISTILLATION = Algorithm(
    name="distillation",
    paper="2306.13649",
    differs="a policy gradient with the k1 estimate as reward per token, discount 0",
    advantage=Teacher(),
    surrogate=ImportanceSampling(),
)
ECHO = Algorithm(
    name="echo",
    differs="GRPO with a model of the world beside it, as prime-rl has it; no paper of its own",
    advantage=GroupRelative(scale="deviation"),
    observation=0.1,
    filters=Filters(zero_variance=CONSTANT),
)
