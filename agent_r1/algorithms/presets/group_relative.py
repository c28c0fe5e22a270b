"""Presets that compare the attempts at the same task with each other."""

from __future__ import annotations

from agent_r1.algorithms.advantages.groups import AgainstGreedy, BestOfK, GroupRelative, SeparateRewards, WhitenedGroup
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Kl
from agent_r1.algorithms.off_policy_losses import Ipo, Vespo
from agent_r1.algorithms.policy_losses import Cispo, Clip, Dppo, Gmpo, ImportanceSampling, PolicyGradient, Sapo, Topr
from agent_r1.algorithms.shaping import Filters
from agent_r1.algorithms.token_masks import ClipCov, KlCov, OffPolicyMask, SecondMoment, TopEntropy

STANDARDIZED = GroupRelative(scale="std")
"""GRPO's advantage: (R - mean R) / std R of the group, with the return R."""


GRPO = Algorithm(
    name="grpo",
    paper="2402.03300",
    deviations="token mean (DAPO) instead of equal weights of trajectories; no KL (--algorithm.kl.coefficient adds "
    "it); dual clip 3, as in verl",
    advantage=STANDARDIZED,
)
DR_GRPO = Algorithm(
    name="dr-grpo",
    paper="2503.20783",
    advantage=GroupRelative(),
    loss=Clip(dual_clip=None),
    aggregation="constant",
    length=1024,
)
DAPO = Algorithm(
    name="dapo",
    paper="2503.14476",
    deviations="attempts out of turns or tokens are excluded from the loss, instead of a soft length penalty; "
    "constant groups are replaced in at most 3 rounds, after which a step may have fewer groups",
    advantage=STANDARDIZED,
    loss=Clip(clip_high=0.28, dual_clip=None),
    filters=Filters(overlong=True),
    constant_groups="drop",
    max_refill_rounds=3,
)
FORKING_TOKENS = Algorithm(
    name="forking-tokens",
    paper="2506.01939",
    deviations="as dapo; the entropy is the policy's before the update, over the whole batch",
    advantage=STANDARDIZED,
    loss=Clip(clip_high=0.28, dual_clip=None),
    token_mask=TopEntropy(),
    filters=Filters(overlong=True),
    constant_groups="drop",
    max_refill_rounds=3,
)
CLIP_COV = Algorithm(
    name="clip-cov",
    paper="2505.22617",
    deviations="with PPO's clip, as in verl; the covariance is the policy's before the update, over the whole batch",
    advantage=STANDARDIZED,
    loss=Clip(dual_clip=None),
    token_mask=ClipCov(),
)
KL_COV = Algorithm(
    name="kl-cov",
    paper="2505.22617",
    deviations="the covariance is the policy's before the update, over the whole batch",
    advantage=STANDARDIZED,
    loss=ImportanceSampling(),
    kl_cov=KlCov(),
)
M2PO = Algorithm(
    name="m2po",
    paper="2510.01161",
    deviations="tokens are masked by the policy before the update, as in AReaL; the authors' code clips instead",
    advantage=STANDARDIZED,
    loss=ImportanceSampling(),
    ratio_denominator="sampler",
    token_mask=SecondMoment(),
)
OPSM = Algorithm(
    name="opsm",
    paper="2512.02556",
    deviations="threshold 0.5 as TRL suggests (slime 1e-4), as the paper gives none; no KL (the paper has "
    "kl.estimator k3_unbiased); routes and sampling masks are not kept; dual clip 3, as in verl",
    advantage=STANDARDIZED,
    off_policy_mask=OffPolicyMask(),
)
GSPO = Algorithm(
    name="gspo",
    paper="2507.18071",
    advantage=STANDARDIZED,
    loss=Clip(clip_low=3e-4, clip_high=4e-4, dual_clip=None),
    ratio_level="trajectory",
    aggregation="trajectory_mean",
)
CISPO = Algorithm(
    name="cispo",
    paper="2506.13585",
    deviations="importance weights up to 5 (ScaleRL, 2510.13786), as the paper gives no bound; no length penalty",
    advantage=STANDARDIZED,
    loss=Cispo(),
)
LUSPO = Algorithm(
    name="luspo",
    paper="2602.05261",
    deviations="GSPO with the sum over tokens: that is its loss times the length of each trajectory",
    advantage=STANDARDIZED,
    loss=Clip(clip_low=2e-3, clip_high=2.5e-3, dual_clip=None),
    ratio_level="trajectory",
    aggregation="constant",
    length=1,
)
SAPO = Algorithm(
    name="sapo",
    paper="2511.20347",
    advantage=STANDARDIZED,
    loss=Sapo(),
    aggregation="trajectory_mean",
)
TOPR = Algorithm(
    name="topr",
    paper="2503.14286",
    deviations="the sign of the advantage, not of the reward, separates good from bad; the geometric mean of a "
    "trajectory's ratios instead of their product; token mean",
    advantage=GroupRelative(),
    loss=Topr(),
    ratio_level="trajectory",
    ratio_denominator="sampler",
)
DPPO = Algorithm(
    name="dppo",
    paper="2602.04879",
    advantage=GroupRelative(),
    loss=Dppo(),
    ratio_denominator="sampler",
)
IPO = Algorithm(
    name="ipo",
    deviations="the symmetric trust region of prime-rl (ipo_loss_fn); without a paper of its own",
    advantage=GroupRelative(),
    loss=Ipo(),
    ratio_denominator="sampler",
)
VESPO = Algorithm(
    name="vespo",
    paper="2602.10693",
    deviations="token mean, as in TRL",
    advantage=STANDARDIZED,
    loss=Vespo(),
    ratio_level="trajectory",
    ratio_denominator="sampler",
)
AIPO = Algorithm(
    name="aipo",
    paper="2505.24034",
    advantage=GroupRelative(baseline="leave_one_out"),
    loss=ImportanceSampling(max_ratio=2.0),
    ratio_denominator="sampler",
)
GMPO = Algorithm(
    name="gmpo",
    paper="2507.20673",
    advantage=STANDARDIZED,
    loss=Gmpo(),
    ratio_level="trajectory",
    aggregation="trajectory_mean",
)
MAXRL = Algorithm(
    name="maxrl",
    paper="2602.02710",
    advantage=GroupRelative(scale="mean"),
    loss=PolicyGradient(),
)
OPO = Algorithm(
    name="opo",
    paper="2505.23585",
    advantage=GroupRelative(baseline="length_weighted"),
    loss=PolicyGradient(),
)
LITE_PPO = Algorithm(
    name="lite-ppo",
    paper="2508.08221",
    advantage=GroupRelative(scale="batch_std"),
    loss=Clip(dual_clip=None),
)
RLOO = Algorithm(
    name="rloo",
    paper="2402.14740",
    deviations="clipped as in PPO, so that a batch can be used more than once; no KL in the reward; dual clip 3, "
    "as in verl",
    advantage=GroupRelative(baseline="leave_one_out"),
)
GPG = Algorithm(
    name="gpg",
    paper="2504.02546",
    deviations="token mean, as in the authors' trainer for text (their trainers for images give trajectories equal "
    "weights); groups without variance are not sampled again until a share is left: constant_groups drop with "
    "max_refill_rounds does that instead",
    advantage=GroupRelative(scale="with_variance"),
    loss=PolicyGradient(),
)
PASS_AT_K = Algorithm(
    name="pass-at-k",
    paper="2503.19595",
    deviations="clipped as in PPO; dual clip 3, as in verl; k is the group unless advantage.k is given (PKPO, "
    "2505.15201); not divided by the standard deviation, while verl divides by it (advantage.divide_by_std)",
    advantage=BestOfK(),
)
GDPO = Algorithm(name="gdpo", paper="2601.05242", advantage=SeparateRewards(), loss=Clip(dual_clip=None))
REINFORCE_PLUS_PLUS_BASELINE = Algorithm(
    name="reinforce++-baseline",
    paper="2501.03262",
    deviations="the KL is k3 with the gradient of k2, instead of k2; not bounded, while verl bounds k3 at 10 "
    "(kl.bound); dual clip 3, as in verl",
    advantage=WhitenedGroup(),
    kl=Kl(coefficient=0.001),
)
REMAX = Algorithm(
    name="remax",
    paper="2310.10505",
    deviations="no KL in the reward; with rewards per turn a token has the return of the whole attempt, while verl "
    "has the return from the token on less the greedy return",
    advantage=AgainstGreedy(),
    loss=PolicyGradient(),
    filters=Filters(greedy=True),
)
