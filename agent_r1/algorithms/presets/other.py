"""The other presets: REINFORCE and its variants, rejection fine-tuning, distillation, and GRPO with a world model."""

from __future__ import annotations

from agent_r1.algorithms.advantages.returns import Success, Teacher, TokenReturns, TurnReturns, Zero
from agent_r1.algorithms.advantages.roles import AgainstRole
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Distillation, Kl
from agent_r1.algorithms.policy_losses import ImportanceSampling, PolicyGradient
from agent_r1.algorithms.presets.group_relative import STANDARDIZED
from agent_r1.algorithms.shaping import Filters

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
