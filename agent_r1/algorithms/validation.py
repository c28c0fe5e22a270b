"""Which parts of an algorithm do not fit together, and why."""

from __future__ import annotations

from collections.abc import Iterator

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.advantages.returns import Success
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.component import Level
from agent_r1.algorithms.loss_terms import Correction, Kl, RewardShaping
from agent_r1.core.errors import InvalidInput


def check_rewriting(row: Algorithm) -> None:
    """Raise InvalidInput where ``row`` cannot learn from episodes whose context is rewritten: what was observed at
    such a place is not a continuation of anything, and what is repeated there would be learned again and again."""
    if row.scope == "episodes":
        do = "take the rule append, or an algorithm that learns actions only"
        raise InvalidInput(
            f"algorithm {row.name}", got="a context rule that rewrites, and observations to learn", do=do
        )


COARSENESS: tuple[Level, ...] = ("token", "turn", "trajectory")


def check(row: Algorithm) -> None:
    """Raise InvalidInput, with the first reason, where parts of ``row`` do not fit together."""
    if reason := next(incompatibilities(row), None):
        raise InvalidInput(f"algorithm {row.name}", got="parts that do not fit", do=reason)


def incompatibilities(row: Algorithm) -> Iterator[str]:
    """Every reason why the parts of a row do not make an algorithm, or one of them would do nothing."""
    yield from _ratio(row)
    yield from _masks(row)
    yield from _kl(row)
    yield from _groups(row)
    yield from _rewards(row)
    yield from _idle(row)
    if "critic" in row.needs and not isinstance(row.advantage, WithCritic):
        yield "an advantage that needs a critic extends WithCritic, which holds the critic's terms"
    if (row.aggregation == "constant") != (row.length is not None):
        yield "length is given with aggregation 'constant', and only with it"


def _ratio(row: Algorithm) -> Iterator[str]:
    kind = row.surrogate.kind or type(row.surrogate).__name__
    if row.ratio not in row.surrogate.levels:
        levels = " or ".join(level for level in COARSENESS if level in row.surrogate.levels)
        yield f"surrogate {kind} is made for the ratio of a {levels}, not of a {row.ratio}"
    if not row.surrogate.uses_ratio and row.anchor == "sampler":
        yield f"anchor sampler does nothing here: surrogate {kind} has no ratio"
    for name, part in (("correction", row.correction), ("rejection", row.rejection)):
        if part is not None and COARSENESS.index(part.level) < COARSENESS.index(row.ratio):
            yield f"{name}.level {part.level} would tear apart what ratio {row.ratio} takes together: make it as coarse"
    if row.correction is not None and row.anchor == "sampler":
        yield "with anchor sampler the ratio holds the disagreement of sampler and trainer already: drop the correction"


def _masks(row: Algorithm) -> Iterator[str]:
    if not row.masks.advantage and not row.advantage.over_time:
        yield "masks.advantage does nothing here: this advantage is the same on all tokens of a turn"
    if not row.masks.loss and row.masks.advantage and row.advantage.over_time:
        yield "masks.loss cannot be off alone: observations would have no advantage (switch masks.advantage off too)"
    if not row.masks.loss and (row.anchor == "sampler" or "teacher" in row.needs or row.compares):
        yield "masks.loss cannot be off here: no sampler chose the observations, so there is nothing to compare with"
    if not row.masks.loss and row.observation:
        yield "observation and masks.loss off are two ways of learning observations: choose one"


def _kl(row: Algorithm) -> Iterator[str]:
    if row.kl is None:
        return
    if row.kl.where == "reward" and row.kl.estimator != "k1":
        yield "a KL in the reward is k1: give kl.estimator k1"
    if row.kl.where == "loss" and row.kl.estimator == "k1":
        yield "k1 has no gradient in expectation: give another kl.estimator, or kl.where reward"


def _groups(row: Algorithm) -> Iterator[str]:
    if "group" not in row.needs:
        if row.filters.zero_variance is not None or row.filters.top_variance is not None:
            yield "this advantage compares no groups: set filters.zero_variance and filters.top_variance to none"
        if row.shaping.length or row.shaping.turns:
            yield "this advantage compares no groups: leave out shaping.length and shaping.turns"
    if row.filters.greedy and "greedy" not in row.needs:
        yield "filters.greedy asks for a greedy attempt that this advantage does not need"
    if "greedy" in row.needs and not row.filters.greedy:
        yield "attempts without a greedy one to compare with have no advantage: set filters.greedy"
    alone = (row.filters.success, row.filters.zero_variance, row.filters.staleness)
    if row.refill and all(value is None for value in alone) and not row.filters.greedy:
        yield "refill does nothing without a filter that leaves a group out by itself, such as zero_variance"
    reshaped = row.shaping.length or row.shaping.turns or (row.kl is not None and row.kl.where == "reward")
    if reshaped and row.filters.zero_variance is not None:
        yield "zero_variance looks at rewards as they came, which shaping and a KL in them change: set it to none"
    if (row.shaping != RewardShaping() or (row.kl is not None and row.kl.where == "reward")) and "greedy" in row.needs:
        yield "the greedy attempt's reward is as it came: leave out shaping and a KL in the reward"


def _rewards(row: Algorithm) -> Iterator[str]:
    if row.advantage.of_sums:
        return
    if row.shaping != RewardShaping():
        yield f"shaping does nothing here: advantage {row.advantage.kind} does not see the sum of rewards"
    if row.kl is not None and row.kl.where == "reward":
        yield f"a KL in the reward does nothing here: advantage {row.advantage.kind} does not see the sum of rewards"


def _idle(row: Algorithm) -> Iterator[str]:
    """Numbers that nothing looks at, windows that nothing is in."""
    correction, rejection = row.correction, row.rejection
    if correction is not None and correction.rule == "truncate" and correction.low != Correction().low:
        yield "correction.low does nothing where ratios are truncated: give correction.rule window"
    for name, window in (("correction", correction), ("rejection", rejection)):
        if window is not None and window.low >= window.high:
            yield f"nothing is between {name}.low {window.low:g} and {name}.high {window.high:g}"
    if row.kl is not None and row.kl.target is None and row.kl.horizon != Kl().horizon:
        yield "kl.horizon does nothing without kl.target"
    if isinstance(row.advantage, Success) and row.filters.success not in (None, row.advantage.threshold):
        yield "filters.success and advantage.threshold say both what is enough: give them the same number"
