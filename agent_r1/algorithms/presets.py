"""Algorithms with a name. The field ``deviations`` says how a preset differs from its paper."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.algorithms.advantages.critics import BiLevelGae, LengthAdaptiveGae, TokenGae, TurnGae
from agent_r1.algorithms.advantages.groups import AgainstGreedy, BestOfK, GroupRelative, SeparateRewards, WhitenedGroup
from agent_r1.algorithms.advantages.returns import AgainstRole, Success, Teacher, TokenReturns, TurnReturns, Zero
from agent_r1.algorithms.advantages.turns import (
    ProcessRelative,
    Replayed,
    SameHistory,
    SameState,
    SameTurn,
    TurnAndOutcome,
)
from agent_r1.algorithms.algorithm import Algorithm, Filters
from agent_r1.algorithms.loss_terms import ClipCov, Distillation, Kl, KlCov, OffPolicyMask, SecondMoment, TopEntropy
from agent_r1.algorithms.policy_losses import (
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    ImportanceSampling,
    Ipo,
    PolicyGradient,
    Sapo,
    Topr,
    Vespo,
)

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
SAPO = Algorithm(name="sapo", paper="2511.20347", advantage=STANDARDIZED, loss=Sapo(), aggregation="trajectory_mean")
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
DPPO = Algorithm(name="dppo", paper="2602.04879", advantage=GroupRelative(), loss=Dppo(), ratio_denominator="sampler")
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
MAXRL = Algorithm(name="maxrl", paper="2602.02710", advantage=GroupRelative(scale="mean"), loss=PolicyGradient())
OPO = Algorithm(
    name="opo", paper="2505.23585", advantage=GroupRelative(baseline="length_weighted"), loss=PolicyGradient()
)
LITE_PPO = Algorithm(
    name="lite-ppo", paper="2508.08221", advantage=GroupRelative(scale="batch_std"), loss=Clip(dual_clip=None)
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


REINFORCE = Algorithm(
    name="reinforce",
    paper="2511.14460",
    deviations="none: the estimator of Williams (1992) over turns, as in Agent-R1",
    advantage=TurnReturns(),
    loss=PolicyGradient(),
)
RAE = Algorithm(
    name="rae",
    paper="2506.24119",
    deviations="a role is named by its group; without roles it is REINFORCE with a running baseline",
    advantage=AgainstRole(),
    loss=PolicyGradient(),
)
REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce++",
    paper="2501.03262",
    deviations="dual clip 3, as in verl",
    advantage=TokenReturns(),
    kl=Kl(coefficient=0.001, estimator="k1", placement="reward"),
)
REJECTION_FINE_TUNING = Algorithm(
    name="rft",
    paper="2308.01825",
    deviations="samples of the present policy, once each; no removal of duplicates",
    advantage=Success(),
    loss=PolicyGradient(),
    filters=Filters(success=1.0),
)
SFT = Algorithm(
    name="sft",
    paper="2203.02155",
    advantage=Zero(),
    loss=PolicyGradient(),
    sft_coef=1.0,
)
DISTILLATION = Algorithm(
    name="distillation",
    paper="2306.13649",
    deviations="a policy gradient with the k1 estimate as the reward of each token, discount 0; the importance "
    "weight has no bound (loss.max_ratio sets one)",
    advantage=Teacher(),
    loss=ImportanceSampling(),
)
TOP_K_DISTILLATION = Algorithm(
    name="top-k-distillation",
    paper="2306.13649",
    deviations="the forward KL only, on samples of the policy only (beta 0 and lambda 1 in the paper); over the "
    "teacher's top 64 tokens and one for all others, as in verl (forward_kl_topk_tail) and TRL; distillation.tail "
    "ignored leaves the others out (forward_kl_topk in verl)",
    advantage=Zero(),
    loss=ImportanceSampling(),
    distillation=Distillation(),
)
ECHO = Algorithm(
    name="echo",
    deviations="GRPO plus a world model, after prime-rl, which only centers the returns, has the trust region of "
    "dppo with a penalty on log r, and weighs the bodies of chosen roles instead of all observations; "
    "dual clip 3, as in verl; without a paper",
    advantage=STANDARDIZED,
    observation_nll_coef=0.1,
)


VINEPPO_TURN = Algorithm(
    name="vineppo-turn",
    paper="2410.01679",
    deviations="values at the turns of an episode instead of sentences; the value of the opening is the mean return of "
    "the other attempts; 2 continuations instead of 9; no KL; dual clip 3, as in verl",
    advantage=Replayed(),
)
GIGPO = Algorithm(
    name="gigpo",
    paper="2505.10978",
    deviations="states are equal word for word, never by similarity; each attempt counts once in the mean return "
    "of its group, as in the paper, while verl-agent counts it once per turn (advantage.average_over "
    "turns); no KL; dual clip 3, as in verl",
    advantage=SameState(),
)
HGPO = Algorithm(
    name="hgpo",
    paper="2602.22817",
    deviations="no KL; a history at which the return equals the mean keeps its weight, while the recipe in "
    "verl-agent drops it; dual clip 3, as in verl",
    advantage=SameHistory(),
)
PROCESS_GRPO = Algorithm(
    name="process-grpo", paper="2402.03300", deviations="no KL; dual clip 3, as in verl", advantage=ProcessRelative()
)
MT_GRPO = Algorithm(
    name="mt-grpo",
    paper="2505.11821",
    deviations="any number of turns: those with tool results get the process advantage; dual clip 3, as in verl",
    advantage=TurnAndOutcome(),
)
GTPO = Algorithm(
    name="gtpo",
    paper="2511.14846",
    deviations="turn rewards are the environment's; none are derived from the similarity of generated programs; "
    "dual clip 3, as in verl",
    advantage=SameTurn(gamma=0.9),
)


PPO = Algorithm(
    name="ppo",
    paper="1707.06347",
    deviations="no entropy bonus; value clip 0.5; dual clip 3, as in verl",
    advantage=TokenGae(lam=0.95),
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
        VINEPPO_TURN,
        GIGPO,
        HGPO,
        PROCESS_GRPO,
        MT_GRPO,
        GTPO,
        REJECTION_FINE_TUNING,
        SFT,
        DISTILLATION,
        TOP_K_DISTILLATION,
        ECHO,
    )
}
"""The presets by name."""
