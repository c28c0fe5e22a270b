"""The checks on a step's numbers: each a bound with a name, what it means to be out of it, and what to do."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.core.weights import PolicyVersion
from agent_r1.trainer.learner import Update
from agent_r1.training.monitor.config import DoctorConfig
from agent_r1.training.monitor.failures import Breaker, alike

AT_ONCE = 1
"""The patience with what must not happen even once."""

REASONS = 3
"""Reasons that are named where nothing was learned, the most common first."""

SPIKE_HISTORY = 20
SPIKE_LEAST = 5
"""Gradient norms that are looked back on, and how many it takes to say what is usual."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is not as it should be. It ends the run where it comes ``patience`` steps in a row; None: never.

    Example:
        Finding("logprob_gap", "engine and learner disagree", "0.2", "at most 0.01", "compare their models", 3)
    """

    check: str
    what: str
    value: str
    bound: str
    do: str
    patience: int | None

    def __str__(self) -> str:
        return f"{self.check}: {self.what} ({self.value}; {self.bound}); {self.do}"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a metric may be at most. ``fresh``: only where all tokens are of the newest weights."""

    metric: str
    most: float
    what: str
    do: str
    patience: int
    fresh: bool = False

    def look(self, metrics: Mapping[str, float]) -> Finding | None:
        value = metrics.get(self.metric)
        if value is None or value <= self.most or (self.fresh and metrics["staleness"] > 0):
            return None  # NaN is below no bound
        return Finding(self.metric, self.what, f"{value:.3g}", f"at most {self.most:g}", self.do, self.patience)


def bounds(config: DoctorConfig, max_staleness: int) -> tuple[Bound, ...]:
    """The bounds of a run's metrics."""
    return (
        Bound(
            metric="skipped_steps",
            most=0,
            what="a loss or gradient was not finite, so optimizer steps were left out and their attempts dropped",
            do="lower trainer.learning_rate, and look for the numbers in the rewards of the attempts dropped there",
            patience=config.patience,
        ),
        Bound(
            metric="first_ratio_deviation",
            most=config.ratio_deviation,
            what="the learner does not give its own tokens the same probability twice before any weight moved",
            do="look for dropout or another source of chance in the model, and for passes of different precision",
            patience=config.patience,
            fresh=True,
        ),
        Bound(
            metric="logprob_gap",
            most=config.logprob_gap,
            what="engine and learner disagree on the log-probability of tokens that the engine sampled",
            do="compare their weights, temperature and attention; training on this is biased",
            patience=config.patience,
            fresh=True,
        ),
        Bound(
            metric="staleness",
            most=max_staleness,
            what="a token was trained that is older than max_staleness allows",
            do="report it: groups were started or taken out of turn",
            patience=AT_ONCE,
        ),
    )


class Spikes:
    """Looks for a gradient norm far above the usual ones. It is clipped, so it is warned of and no more."""

    def __init__(self, times: float) -> None:
        self._times = times
        self.norms: deque[float] = deque(maxlen=SPIKE_HISTORY)

    def look(self, metrics: Mapping[str, float]) -> Finding | None:
        norm = metrics.get("policy_gradient_norm")
        if norm is None:
            return None
        usual = statistics.median(self.norms) if len(self.norms) >= SPIKE_LEAST else None
        self.norms.append(norm)
        if usual is None or norm <= self._times * usual:
            return None
        what, do = "the gradient is far above what is usual", "look at the step's rewards if this goes on"
        bound = f"at most {self._times:g} times the median of {usual:.3g}"
        return Finding("gradient_spike", what, f"{norm:.3g}", bound, do, None)


def same_weights(served: PolicyVersion, published: PolicyVersion) -> Finding | None:
    """Return a finding if the engine does not serve the weights that the trainer published, by number and checksum."""
    if (served.number, served.checksum) == (published.number, published.checksum):
        return None
    return Finding(
        check="weights",
        what="the engine does not hold the weights that the learner made",
        value=f"version {served.number}, checksum {(served.checksum or 'none')[:12]}",
        bound=f"the learner's is version {published.number}, {(published.checksum or 'none')[:12]}",
        do="report it, with the engine in use: attempts would be sampled from other weights than recorded",
        patience=AT_ONCE,
    )


def idle(update: Update, most: int) -> Finding | None:
    """Whether a step taught nothing: all its attempts were left out, or none has an advantage.

    Not one whose numbers were not finite, which is found by itself.
    """
    if any(fate.fate == "trained" for fate in update.fates) or update.metrics.get("skipped_steps"):
        return None
    causes = Counter(alike(fate.reason or "") for fate in update.fates)
    reasons = [f"{count} x {cause}" for cause, count in causes.most_common(REASONS)]
    reasons += [f"{len(causes) - REASONS} other reasons"] if len(causes) > REASONS else []
    return Finding(
        check="nothing_learned",
        what="no attempt of the step taught anything",
        value=f"{', '.join(reasons)}; mean reward {update.metrics['reward']:.3g}",
        bound=f"at most {most} such steps in a row",
        do=(
            "give tasks that are solved now and then, or a reward that tells attempts apart, or a larger group_size; "
            "where the reward is as high as it can be, training is done"
        ),
        patience=most,
    )


def shrunk(before: int, now: int) -> Finding | None:
    """Whether memory ran out, so that passes hold fewer tokens from now on."""
    if now >= before:
        return None
    return Finding(
        check="memory",
        what="memory ran out in an update, which was begun again in smaller passes",
        value=f"{now} tokens",
        bound=f"before it were {before}",
        do=f"set trainer.micro_tokens to {now}, so that the next run need not find out",
        patience=None,
    )


def doubts(breaker: Breaker) -> Iterator[Finding]:
    """What fails, and does not stop the run: too little of it was seen, or it may be the agent's fault."""
    for name, causes in breaker.mixed():
        what, value = f"the last calls of the tool {name!r} all failed", f"{causes} different causes"
        do = "call it by hand; for what the agent did wrong it should give text, and not raise"
        yield Finding(f"tool {name}", what, value, "of one cause they would stop the run", do, None)
    if early := breaker.early():
        what, do = "many of the first attempts failed", "look at their reasons: a longer run would be stopped for it"
        yield Finding("failures", what, "{} of {}".format(*early), "too few to stop the run", do, None)


def torn(group: Group, serial: int, size: int, greedy: bool) -> Finding | None:
    """Whether a group is not the one that was asked for: number ``serial``, with ``size`` attempts to compare, and
    with a greedy one beside them or without.

    As numbers only ever go up, and a place holds one attempt, no attempt can come twice.
    """
    lived = [*group.trajectories, *([group.greedy] if group.greedy is not None else [])]
    places = [(t.attempt.group_id, t.attempt.sample_index, t.attempt.task) for t in lived]
    wanted = [(serial, member, group.task.id) for member in range(size + greedy)]
    origins = {(t.attempt.run, t.attempt.group_id, t.attempt.task) for t in (*lived, *group.retried)}
    finding = "a group is not what was asked for: comparing its attempts would be wrong"
    do = "report it: attempts were lost, doubled or mixed up"
    if group.group_id != serial or places != wanted or len(origins) != 1:
        got = f"group {group.group_id} of {group.task.id} with (group, member, task) {places}"
        got += f" of {len(origins)} different (run, group, task)"
        return Finding("group", finding, got, f"group {serial} with members 0 to {len(wanted) - 1}", do, AT_ONCE)
    tries = {trajectory.attempt.sample_index: trajectory.attempt.retry for trajectory in lived}
    if wrong := _wrong_tries(group.retried, tries):
        return Finding("group", finding, f"tries {wrong}", "each place's tries counted from 0", do, AT_ONCE)
    return None


def _wrong_tries(retried: tuple[Trajectory, ...], tries: Mapping[int, int]) -> list[tuple[int, int]]:
    """(member, retry) of attempts that are missing, or too many, before the last ones."""
    found = sorted((trajectory.attempt.sample_index, trajectory.attempt.retry) for trajectory in retried)
    wanted = sorted((member, retry) for member, last in tries.items() for retry in range(last))
    return [] if found == wanted else sorted({*found} ^ {*wanted}) or found
