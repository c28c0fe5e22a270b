"""What an algorithm optimises, written out with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Level

LEVELS: Mapping[Level, str] = {
    "token": "",
    "turn": ", geometric mean over the turn",
    "trajectory": ", geometric mean over the trajectory",
}


def objective(row: Algorithm) -> str:
    """The effective objective in one line."""
    return "; ".join(clauses(row))


def clauses(row: Algorithm) -> Iterator[str]:
    """Its parts: what is maximised, what its letters mean, what is added and what is left out."""
    yield f"maximise the {_aggregated(row)} of {row.surrogate.formula}"
    if row.surrogate.uses_ratio:
        yield f"r = pi / {'pi_old' if row.anchor == 'policy' else 'mu'}{LEVELS[row.ratio]}"
    yield f"A = {row.advantage.formula}"
    yield from _added(row)
    if isinstance(row.advantage, WithCritic):
        yield from _critic(row.advantage)
    if row.filters.formula:
        yield f"left out: {row.filters.formula}"
    if row.refill:
        yield f"up to {row.refill} rounds of further groups in their place"
    yield from (f"{name} mask off" for name, on in row.masks if not on)
    if row.epochs > 1:
        yield f"{row.epochs} epochs"


def _aggregated(row: Algorithm) -> str:
    if row.length is not None:
        return f"sum over tokens / ({row.length:g} * trajectories)"
    return row.aggregation.replace("_", " ")


def _added(row: Algorithm) -> Iterator[str]:
    if row.shaping.formula:
        yield row.shaping.formula
    yield from (part.formula for part in (row.kl, row.correction, row.rejection) if part is not None)
    weights = (
        (row.entropy, "the entropy"),
        (row.imitation, "the token mean of log pi of trajectories with R > 0"),
        (row.observation, "the token mean of log pi of what the world said"),
    )
    yield from (f"plus {weight:g} {what}" for weight, what in weights if weight)


def _critic(advantage: WithCritic) -> Iterator[str]:
    yield f"V within {advantage.value_clip:g} of V_old regresses on A + V_old"
    if advantage.bootstrap:
        yield "where an episode was cut, V of the state it stopped in follows"
    if advantage.warmup:
        yield f"the critic alone for {advantage.warmup} updates"
