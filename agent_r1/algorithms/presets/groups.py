"""Algorithms that compare the attempts at one task with each other."""

from __future__ import annotations

from agent_r1.algorithms.advantages.groups import AgainstGreedy, GroupRelative, SeparateRewards, WhitenedGroup
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.filters import Filters
from agent_r1.algorithms.loss_terms import Kl
from agent_r1.algorithms.ops.group_stats import CONSTANT
from agent_r1.algorithms.policy_losses import Cispo, Clip, Dppo, Gmpo, ImportanceSampling, PolicyGradient, Sapo, Topr

STANDARD = GroupRelative(scale="deviation")
VARIED = Filters(zero_variance=CONSTANT)

GRPO = Algorithm(
    name="grpo",
    paper="2402.03300",
    differs="token mean (DAPO) where the paper weighs trajectories alike; no KL (--row.kl.coefficient adds it)",
    advantage=STANDARD,
    filters=VARIED,
)
DR_GRPO = Algorithm(
    name="dr-grpo",
    paper="2503.20783",
    advantage=GroupRelative(),
    surrogate=Clip(dual=None),
    aggregation="constant",
    length=1024,
    filters=VARIED,
)
DAPO = Algorithm(
    name="dapo",
    paper="2503.14476",
    differs="attempts out of turns or tokens do not count, in place of the soft length penalty",
    advantage=STANDARD,
    surrogate=Clip(high=0.28, dual=None),
    filters=Filters(overlong=True, zero_variance=CONSTANT),
    refill=3,
)
GSPO = Algorithm(
    name="gspo",
    paper="2507.18071",
    advantage=STANDARD,
    surrogate=Clip(low=3e-4, high=4e-4, dual=None),
    ratio="trajectory",
    aggregation="trajectory_mean",
    filters=VARIED,
)
CISPO = Algorithm(
    name="cispo",
    paper="2506.13585",
    differs="ratios count up to 5 (ScaleRL, 2510.13786), where the paper names no bound; no length penalty",
    advantage=STANDARD,
    surrogate=Cispo(),
    filters=VARIED,
)
SAPO = Algorithm(
    name="sapo",
    paper="2511.20347",
    advantage=STANDARD,
    surrogate=Sapo(),
    aggregation="trajectory_mean",
    filters=VARIED,
)
TOPR = Algorithm(
    name="topr",
    paper="2503.14286",
    differs="the advantage's sign, not the reward's, tells good from bad; the geometric mean of a trajectory's ratios, "
    "where the paper takes their product; token mean",
    advantage=GroupRelative(),
    surrogate=Topr(),
    ratio="trajectory",
    anchor="sampler",
    filters=VARIED,
)
DPPO = Algorithm(
    name="dppo",
    paper="2602.04879",
    advantage=GroupRelative(),
    surrogate=Dppo(),
    anchor="sampler",
    filters=VARIED,
)
AIPO = Algorithm(
    name="aipo",
    paper="2505.24034",
    advantage=GroupRelative(baseline="others"),
    surrogate=ImportanceSampling(bound=2.0),
    anchor="sampler",
    filters=VARIED,
)
GMPO = Algorithm(
    name="gmpo",
    paper="2507.20673",
    advantage=STANDARD,
    surrogate=Gmpo(),
    ratio="trajectory",
    aggregation="trajectory_mean",
    filters=VARIED,
)
MAXRL = Algorithm(
    name="maxrl",
    paper="2602.02710",
    advantage=GroupRelative(scale="mean"),
    surrogate=PolicyGradient(),
    filters=VARIED,
)
OPO = Algorithm(
    name="opo",
    paper="2505.23585",
    advantage=GroupRelative(baseline="lengths"),
    surrogate=PolicyGradient(),
    filters=VARIED,
)
LITE_PPO = Algorithm(
    name="lite-ppo",
    paper="2508.08221",
    advantage=GroupRelative(scale="batch"),
    surrogate=Clip(dual=None),
    filters=VARIED,
)
RLOO = Algorithm(
    name="rloo",
    paper="2402.14740",
    differs="clipped like PPO, so that a batch can be used more than once; no KL in the reward",
    advantage=GroupRelative(baseline="others"),
    filters=VARIED,
)
GDPO = Algorithm(name="gdpo", paper="2601.05242", advantage=SeparateRewards(), surrogate=Clip(dual=None))
REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    name="reinforce++-baseline",
    paper="2501.03262",
    differs="k2 as a loss in the paper; here k3 with the gradient of k2",
    advantage=WhitenedGroup(),
    kl=Kl(coefficient=0.001),
)
REMAX = Algorithm(
    name="remax",
    paper="2310.10505",
    differs="no KL in the reward",
    advantage=AgainstGreedy(),
    surrogate=PolicyGradient(),
    filters=Filters(greedy=True),
)
