"""The objective of an algorithm in words and formulas, with the values of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Level

RATIO_LEVELS: Mapping[Level, str] = {
    "token": "",
    "turn": ", geometric mean over the turn",
    "trajectory": ", geometric mean over the trajectory",
}


def objective(algorithm: Algorithm) -> str:
    """Return the objective of the algorithm in one line, with clauses separated by semicolons."""
    return "; ".join(clauses(algorithm))


def clauses(algorithm: Algorithm) -> Iterator[str]:
    """Yield the clauses of the objective as text, such as "A = R - mean R of the group"."""
    aggregated = algorithm.aggregation.replace("_", " ")
    if algorithm.length is not None:
        aggregated = f"sum over tokens / ({algorithm.length:g} * trajectories)"
    yield f"maximize the {aggregated} of {algorithm.loss.formula}"
    if algorithm.loss.uses_ratio:
        denominator = "pi_old" if algorithm.ratio_denominator == "old_policy" else "mu"
        yield f"r = pi / {denominator}{RATIO_LEVELS[algorithm.ratio_level]}"
    yield f"A = {algorithm.advantage.formula}"
    if algorithm.shaping.formula:
        yield algorithm.shaping.formula
    masks = (algorithm.token_mask, algorithm.off_policy_mask, algorithm.kl_cov)
    terms = (algorithm.kl, algorithm.distillation, algorithm.correction, algorithm.rejection, *masks)
    yield from (term.formula for term in terms if term is not None)
    added = (
        (algorithm.entropy_coef, "the entropy"),
        (algorithm.sft_coef, "the token mean of log pi of trajectories with R > 0"),
        (algorithm.observation_nll_coef, "the token mean of log pi of observations"),
    )
    yield from (f"plus {coefficient:g} {term}" for coefficient, term in added if coefficient)
    if isinstance(algorithm.advantage, WithCritic):
        yield from _critic_clauses(algorithm.advantage)
    if algorithm.filters.formula:
        yield f"left out: {algorithm.filters.formula}"
    if algorithm.constant_groups == "drop":
        yield "groups whose returns are all equal are dropped before the denominators"
    if algorithm.max_refill_rounds:
        yield f"up to {algorithm.max_refill_rounds} rounds of further groups in their place"
    yield from (f"{name} mask off" for name, is_on in algorithm.masks if not is_on)
    if algorithm.epochs > 1:
        yield f"{algorithm.epochs} epochs"


def _critic_clauses(advantage: WithCritic) -> Iterator[str]:
    yield f"V within {advantage.value_clip:g} of V_old regresses on A + V_old"
    if advantage.bootstrap:
        yield "if an episode was truncated, V of its last state follows"
    if advantage.warmup:
        yield f"only the critic for {advantage.warmup} updates"
