"""Health checks of groups and steps."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.core.trajectory import Group
from agent_r1.core.weights import PolicyVersion, ProductPrecision
from agent_r1.trainer.report import Trained
from agent_r1.trainer.updater import UpdateReport
from agent_r1.training.monitor.circuit_breaker import CircuitBreaker, normalize_reason, shorten_reason
from agent_r1.training.monitor.config import MonitorConfig

LOGPROB_GAP = "logprob_gap"
"""The name of the metric for the largest difference between a token's log-probabilities in engine and trainer."""

_STOP_AT_ONCE = 1
_MAX_REASONS = 3
_SPIKE_HISTORY = 20
_SPIKE_MIN_HISTORY = 5
_MIN_EXPLAINED_VARIANCE = 0.05
_MIN_EFFECTIVE_SHARE = 0.5
_ADVICE_EQUAL_REWARDS = (
    "use tasks that are solved sometimes, a reward that distinguishes attempts, or a larger group_size; "
    "if the reward is at its maximum, training is done"
)
_ADVICE_FAILURES = "remove the cause of the failures: most attempts could not be trained"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check found in a step.

    Attributes:
        check: the name of the check.
        what: the problem.
        value: the measured value.
        limit: the limit of the value.
        do: advice.
        patience: the run is stopped after this number of consecutive steps with the finding; None: only warn.
        warn_after: the monitor warns after this number of consecutive steps.

    Example:
        Finding(check="logprob_gap", what="engine and trainer disagree", value="0.2", limit="at most 0.01",
                do="compare their models", patience=3)
    """

    check: str
    what: str
    value: str
    limit: str
    do: str
    patience: int | None
    warn_after: int = 1

    def __str__(self) -> str:
        return f"{self.check}: {self.what} ({self.value}; {self.limit}); {self.do}"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A check that one metric does not exceed a maximum.

    Attributes:
        metric: the name of the metric, and of the check.
        what, do, patience: see :class:`Finding`.
        on_policy_only: whether to skip steps with stale tokens (sampled with older weights). Such tokens increase the
            metric, although nothing is wrong.
    """

    metric: str
    maximum: float
    what: str
    do: str
    patience: int
    on_policy_only: bool = False

    def check(self, metrics: Mapping[str, float]) -> Finding | None:
        """Return a finding if the metric exceeds the maximum or is NaN. Return None if the step lacks the metric."""
        value = metrics.get(self.metric)
        # NaN is a finding, because the comparison with NaN is false.
        if value is None or value <= self.maximum or (self.on_policy_only and metrics["staleness"] > 0):
            return None
        return Finding(self.metric, self.what, f"{value:.3g}", f"at most {self.maximum:g}", self.do, self.patience)


def metric_checks(
    config: MonitorConfig,
    max_staleness: int,
    trainer: ProductPrecision = "float32",
    engine: ProductPrecision = "float32",
) -> tuple[HealthCheck, ...]:
    """Return the checks of a step's metrics, for the precisions of trainer and engine."""
    return (
        HealthCheck(
            metric="skipped_steps",
            maximum=0,
            what="a loss or gradient was not finite, so optimizer steps were skipped; attempts that no applied step of "
            "the policy used were dropped",
            do="lower the learning rates, and look at the rewards of the attempts dropped there",
            patience=config.patience,
        ),
        HealthCheck(
            metric="first_ratio_deviation",
            maximum=config.ratio_limit(trainer),
            what="the trainer computes different probabilities for the same tokens and weights",
            do="look for dropout or other randomness in the model, and for passes with different precision",
            patience=config.patience,
            on_policy_only=True,
        ),
        HealthCheck(
            metric=LOGPROB_GAP,
            maximum=config.gap_limit(trainer, engine),
            what="engine and trainer disagree on the log-probability of sampled tokens",
            do="compare their weights, temperature and attention; training with this gap is biased",
            patience=config.patience,
            on_policy_only=True,
        ),
        HealthCheck(
            metric="staleness",
            maximum=max_staleness,
            what="a token was trained that is older than max_staleness allows",
            do="report it: groups were started or consumed out of order",
            patience=_STOP_AT_ONCE,
        ),
    )


class GradientSpikeDetector:
    """A check that warns if the policy's gradient norm is far above the median of recent norms.

    Attributes:
        norms: the recent gradient norms, oldest first.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.norms: deque[float] = deque(maxlen=_SPIKE_HISTORY)

    def check(self, metrics: Mapping[str, float]) -> Finding | None:
        norm = metrics.get("policy_gradient_norm")
        if norm is None:
            return None
        median = statistics.median(self.norms) if len(self.norms) >= _SPIKE_MIN_HISTORY else None
        self.norms.append(norm)
        if median is None or norm <= self._factor * median:
            return None
        what, do = "the gradient norm is far above the recent median", "look at the step's rewards if this continues"
        limit = f"at most {self._factor:g} times the median of {median:.3g}"
        return Finding("gradient_spike", what, f"{norm:.3g}", limit, do, None)


def check_weights(served: PolicyVersion, published: PolicyVersion) -> Finding | None:
    """Return a finding if the engine does not serve the published weights."""
    if (served.number, served.checksum) == (published.number, published.checksum):
        return None
    return Finding(
        check="weights",
        what="the engine does not serve the weights that the trainer published",
        value=f"version {served.number}, checksum {(served.checksum or 'none')[:12]}",
        limit=f"published: version {published.number}, checksum {(published.checksum or 'none')[:12]}",
        do="report it, with the engine in use: attempts would be sampled from other weights than recorded",
        patience=_STOP_AT_ONCE,
    )


def check_no_signal(update: UpdateReport, patience: int | None) -> Finding | None:
    """Return a finding if no attempt of a step was trained.

    ``patience`` is the number of consecutive findings after which the run is stopped; None: findings are only warnings.
    A step with a non-finite loss or gradient has no finding here, because the check ``skipped_steps`` reports the step.
    """
    if any(isinstance(outcome, Trained) for outcome in update.outcomes) or update.metrics.get("skipped_steps"):
        return None
    untrained = [one.reason for one in update.outcomes if not isinstance(one, Trained)]
    reasons = list(_count_reasons(untrained))
    others = len(reasons) - _MAX_REASONS
    reasons[_MAX_REASONS:] = [f"{others} other reasons"] if others > 0 else []
    return Finding(
        check="nothing_learned",
        what="no attempt of the step was trained",
        value=f"{', '.join(reasons)}; mean reward {update.metrics['reward']:.3g}",
        limit="too few steps to stop the run" if patience is None else f"at most {patience} such steps in a row",
        do=_ADVICE_FAILURES if 2 * update.metrics["failed"] > len(untrained) else _ADVICE_EQUAL_REWARDS,
        patience=patience,
    )


def _count_reasons(reasons: Sequence[str]) -> Iterator[str]:
    causes = Counter(map(normalize_reason, reasons))
    for cause, count in causes.most_common():
        texts = {shorten_reason(reason) for reason in reasons if normalize_reason(reason) == cause}
        yield f"{count} x {cause if len(texts) > 1 else texts.pop()}"


def check_critic(metrics: Mapping[str, float], steps: int) -> Finding | None:
    """Return a finding if the critic explained almost none of the variance of a step's returns.

    ``steps`` is the number of consecutive findings after which the monitor warns.
    """
    explained = metrics.get("critic/explained_variance")
    # NaN is a finding, because the comparison with NaN is false.
    if explained is None or explained >= _MIN_EXPLAINED_VARIANCE:
        return None
    return Finding(
        check="critic",
        what="the critic does not predict the returns of new attempts, so its advantages have no useful baseline",
        value=f"{explained:.3g}",
        limit=f"at least {_MIN_EXPLAINED_VARIANCE:g} within {steps} steps",
        do="give the critic more optimizer steps (trainer.critic_epochs, trainer.critic_minibatches) or a higher "
        "trainer.critic_learning_rate; where chance decides the outcome, take an algorithm without a critic",
        patience=None,
        warn_after=steps,
    )


def check_effective_share(metrics: Mapping[str, float]) -> Finding | None:
    """Return a finding if few tokens have most of a step's importance weight."""
    share = metrics.get("correction/effective_share")
    # NaN is a finding, because the comparison with NaN is false.
    if share is None or share >= _MIN_EFFECTIVE_SHARE:
        return None
    return Finding(
        check="effective_share",
        what="the importance weights of the correction differ so much that few tokens decide the update",
        value=f"{share:.3g} of the tokens",
        limit=f"at least {_MIN_EFFECTIVE_SHARE:g}",
        do="set algorithm.correction.level to token, give engine and trainer one data type, or lower max_staleness",
        patience=None,
    )


def check_memory_reduced(before: int, now: int) -> Finding | None:
    """Return a finding if memory ran out in an update, so that the micro-batches became smaller.

    ``before`` and ``now`` are the maximum number of tokens in a micro-batch before and after the update.
    """
    if now >= before:
        return None
    return Finding(
        check="memory",
        what="memory ran out in an update, which was repeated with smaller micro-batches",
        value=f"{now} tokens",
        limit=f"{before} before",
        do=f"set trainer.micro_tokens to {now}, so that the next run starts with it",
        patience=None,
    )


def tool_warnings(breaker: CircuitBreaker) -> Iterator[Finding]:
    """Yield warnings about failures that do not stop the run.

    - All recent calls of a tool failed, but for different causes.
    - A large share of the first attempts failed, but too few attempts have ended to stop the run.
    """
    for name, causes in breaker.tools_failing_for_several_causes():
        what, value = f"the last calls of the tool {name!r} all failed", f"{causes} different causes"
        do = "call it by hand; for errors of the agent it should return text instead of raising"
        yield Finding(f"tool {name}", what, value, "with one cause they would stop the run", do, None)
    if early := breaker.early_failures():
        what = "many of the first attempts failed"
        do = f"look at them, such as 'agent-r1 show {breaker.run} failed': a longer run would be stopped"
        yield Finding("failures", what, "{} of {}".format(*early), "too few to stop the run", do, None)


def check_group_integrity(group: Group, group_id: int, size: int, greedy: bool) -> Finding | None:
    """Return a finding if a group differs from the requested group, for example if an attempt is missing or repeated.

    The group must have the id ``group_id``, ``size`` sampled attempts, and if ``greedy`` is true also a greedy attempt.
    """
    what = "a group is not the requested one: comparing its attempts would be wrong"
    do = "report it: attempts were lost, duplicated or mixed up"
    trajectories = [*group.trajectories, *([group.greedy] if group.greedy is not None else [])]
    found = [(t.attempt.group_id, t.attempt.sample_index, t.attempt.task) for t in trajectories]
    expected = [(group_id, index, group.task.id) for index in range(size + greedy)]
    origins = {(t.attempt.run, t.attempt.group_id, t.attempt.task) for t in (*trajectories, *group.retried)}
    if group.group_id != group_id or found != expected or len(origins) != 1:
        got = f"group {group.group_id} of {group.task.id} with (group, index, task) {found}"
        got += f" of {len(origins)} different (run, group, task)"
        limit = f"group {group_id} with indices 0 to {len(expected) - 1}"
        return Finding("group", what, got, limit, do, _STOP_AT_ONCE)
    # If the attempt of an index is retry n, the group must have exactly the earlier retries 0 to n - 1 of this index.
    retries = sorted((t.attempt.sample_index, t.attempt.retry) for t in group.retried)
    complete = sorted((t.attempt.sample_index, retry) for t in trajectories for retry in range(t.attempt.retry))
    if retries != complete:
        wrong = sorted({*retries} ^ {*complete}) or retries
        return Finding("group", what, f"retries {wrong}", "retries of each index counted from 0", do, _STOP_AT_ONCE)
    return None
