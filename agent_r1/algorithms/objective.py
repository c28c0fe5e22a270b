"""The objective of an algorithm in words and formulas, with the values of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.advantages.returns import Zero
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Level

RATIO_LEVELS: Mapping[Level, str] = {
    "token": "",
    "turn": ", geometric mean over the turn",
    "trajectory": ", geometric mean over the trajectory",
}


def objective(algorithm: Algorithm) -> str:
    """Return the objective of the algorithm in one line."""
    return "; ".join(clauses(algorithm))


def inactive_terms(algorithm: Algorithm, optimizer_steps: int, max_staleness: int) -> str:
    """Return one sentence that names the settings without an effect on the gradient, or "".

    Settings of the loss, such as the clip, have no effect if the importance ratio r is always 1. This is the case with
    one optimizer step per batch and samples without staleness. Otherwise the result is "". The result is also "" if the
    loss does not depend on r, or if the advantage is always 0.

    Args:
        algorithm: The algorithm.
        optimizer_steps: Number of optimizer steps per batch: epochs * minibatches.
        max_staleness: Largest staleness of a sample, in optimizer steps.
    """
    if optimizer_steps > 1 or max_staleness or not algorithm.loss.uses_ratio or isinstance(algorithm.advantage, Zero):
        return ""
    bounds = [f"loss.{field}" for field in type(algorithm.loss).model_fields if field != "name"]
    bounds += ["ratio_level"] if algorithm.ratio_level != "token" else []
    if isinstance(algorithm.advantage, WithCritic):
        bounds.append("advantage.value_clip")
    named = f", and {', '.join(bounds)} cannot act" if bounds else ""
    return (
        "With one optimizer step per batch of fresh samples r is 1: the loss has the gradient of A log pi, as every "
        f"other loss with this advantage and aggregation has{named}; "
        "set trainer.minibatches, algorithm.epochs or max_staleness"
    )


def clauses(algorithm: Algorithm) -> Iterator[str]:
    """Yield the clauses of the objective: the maximized term, the formulas of r and A, the other terms, the filters."""
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
