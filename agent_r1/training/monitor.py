"""Health monitoring of a training run: checks of groups and steps, and a circuit breaker for failing attempts."""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev, variance

from agent_r1.core.errors import RunStopped
from agent_r1.core.events import LogEvent, Recorder
from agent_r1.core.inference import PolicyVersion, ProductPrecision
from agent_r1.core.messages import Text
from agent_r1.core.trajectory import (
    STATUS_POLICY,
    AttemptId,
    Group,
    Status,
    Trajectory,
    can_be_summed,
    weighted_rewards,
)
from agent_r1.data.training_sample import Excluded, describe_status
from agent_r1.model.weights import product_precision
from agent_r1.store.folder import run_argument
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind
from agent_r1.trainer.report import Trained
from agent_r1.trainer.updater import PolicyUpdater, SelectedGroup, UpdateReport
from agent_r1.training.config import MonitorConfig, TrainConfig

_OVERRIDE = "  to continue nevertheless: --monitor.failure_share 1"

CALL_WINDOW = 64
"""A run is stopped after this number of consecutive calls of one tool that failed for the same cause."""

MAX_REASONS = 5

MAX_REASON_LENGTH = 110

ADVICE: Mapping[str, str] = {
    Status.ENVIRONMENT_FAILED: "the environment or your agent raised: run it by hand with the example's task",
    Status.ENGINE_FAILED: "the engine could not generate: if memory ran out, lower --concurrency or --context",
    Status.REWARD_FAILED: "a scorer raised or took too long: call it on the example's trajectory; see --score_seconds",
    Status.CANCELLED: "by the engine, or after --episode_seconds, see the reason: find what hangs, or raise the limit",
}
UNSCORED = "unscored"
_ADVICE_UNSCORED = (
    "a reward function raised or returned no finite number, or the policy sampled no token: "
    "test the function (docs/rewards.md)"
)
_ADVICE_TOOL = (
    "the tool always fails: call it by hand; for errors of the agent it should return text instead of raising"
)

_PLACE = re.compile(r" \([^()]{1,50}:\d+, in [^()]{1,30}\)$")
"""A regular expression for the place of an exception, such as " (agent.py:12, in find)"."""

_TOOL_FAILURES = frozenset({ToolErrorKind.RAISED, ToolErrorKind.TIMED_OUT, ToolErrorKind.BAD_RESULT})


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that failed, or that cannot be trained on, for example because a reward is not finite."""

    attempt: AttemptId
    status: Status
    reason: str

    @property
    def kind(self) -> str:
        """The status of the attempt, such as "environment_failed", or "unscored" if a reward could not be computed."""
        return UNSCORED if STATUS_POLICY[self.status] == "train" else str(self.status)


@dataclass(frozen=True, slots=True)
class FailedToolCall:
    """A valid call whose tool raised an exception, took too long, or returned a value of a wrong type."""

    attempt: AttemptId
    reason: str

    @property
    def cause(self) -> str:
        """The cause of the failure: the text of ``reason`` before the second colon, with ``#`` for each number."""
        return normalize_reason(": ".join(self.reason.split(": ")[:2]))


def normalize_reason(reason: str) -> str:
    """Return the reason of a failure, shortened, with each number replaced by ``#``."""
    shortened = " ".join(reason.split())[:MAX_REASON_LENGTH]
    return re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)?", "#", shortened)


@dataclass(frozen=True, slots=True)
class CircuitBreakerState:
    """The state of a circuit breaker: the recent attempts, and the recent calls of each tool, oldest first.

    An attempt or a call that did not fail is stored as None.

    Example:
        CircuitBreakerState(attempts=(None, FailedAttempt(..)), calls={"search": (FailedToolCall(..), None)})
    """

    attempts: tuple[FailedAttempt | None, ...] = ()
    calls: Mapping[str, tuple[FailedToolCall | None, ...]] = field(default_factory=dict)


class CircuitBreaker:
    """A breaker that stops the run if too many recent attempts failed, or if a tool always fails.

    If an attempt was retried, only its last retry is counted.

    Args:
        share: the largest allowed share of failed attempts. 1: the run is never stopped, even if a tool always fails.
        window: the number of recent attempts that are counted. The window should hold several groups, because one
            error of a scorer fails all attempts of a group.
        call_window: the number of recent calls of each tool that are counted; see :data:`CALL_WINDOW`.
        run: the name of the run, for commands in the diagnosis.
    """

    def __init__(self, share: float, window: int, call_window: int = CALL_WINDOW, run: str = "RUN") -> None:
        self._share, self._window, self._call_window, self.run = share, window, call_window, run
        self._attempts: deque[FailedAttempt | None] = deque(maxlen=window)
        self._calls: dict[str, deque[FailedToolCall | None]] = {}

    def record(self, group: Group, excluded: Sequence[Excluded]) -> str | None:
        """Record the attempts and tool calls of a group. Return a diagnosis if the run must be stopped.

        Call this method before the run trains on the group. ``excluded`` are the attempts of the group that cannot be
        trained on. These attempts count as failed.
        """
        reasons = {one.attempt: one.reason for one in excluded}
        trajectories = group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)
        reasons |= {t.attempt: describe_status(t) for t in trajectories if STATUS_POLICY[t.status] != "train"}
        for trajectory in trajectories:
            attempt, status = trajectory.attempt, trajectory.status
            failed = FailedAttempt(attempt, status, reasons[attempt]) if attempt in reasons else None
            self._attempts.append(failed)
            for name, call in _valid_calls(trajectory):
                self._calls.setdefault(name, deque(maxlen=self._call_window)).append(call)
        if self._share == 1:
            return None
        failures = [attempt for attempt in self._attempts if attempt is not None]
        if len(failures) > self._share * self._window:
            limit = f"a share of {self._share:g} in {self._window} is the limit"
            return "\n".join(diagnose(failures, len(self._attempts), limit, self.run))
        return next(filter(None, (self._diagnose_tool(name) for name in self._calls)), None)

    def tools_failing_for_several_causes(self) -> Iterator[tuple[str, int]]:
        """Yield (name, number of causes) for each tool whose recent calls all failed, but for different causes.

        Such failures do not stop the run, because they can be errors of the agent.
        """
        for name in self._calls:
            causes = {call.cause for call in self._failed_calls(name)}
            if len(causes) > 1:
                yield name, len(causes)

    def early_failures(self) -> tuple[int, int] | None:
        """Return (failed attempts, ended attempts) if too many attempts failed at the beginning of the run."""
        failed, seen = sum(attempt is not None for attempt in self._attempts), len(self._attempts)
        return (failed, seen) if seen < self._window and failed > self._share * seen else None

    def state(self) -> CircuitBreakerState:
        calls = {name: tuple(calls) for name, calls in self._calls.items()}
        return CircuitBreakerState(tuple(self._attempts), calls)

    def load_state(self, state: CircuitBreakerState) -> None:
        self._attempts.extend(state.attempts)
        self._calls.update((name, deque(calls, maxlen=self._call_window)) for name, calls in state.calls.items())

    def _diagnose_tool(self, name: str) -> str | None:
        failed = self._failed_calls(name)
        if len({call.cause for call in failed}) != 1:
            return None
        return "\n".join(
            (
                f"the last {len(failed)} calls of the tool {name!r} all failed, for one reason",
                f"{len(failed):>6} x {shorten_reason(failed[-1].reason)}",
                _example(failed[-1].attempt, self.run),
                "what to do",
                f"  {name}: {_ADVICE_TOOL}",
                _OVERRIDE,
            )
        )

    def _failed_calls(self, name: str) -> list[FailedToolCall]:
        # Return the last ``call_window`` calls of a tool if all of them failed; [] otherwise.
        failed = [call for call in self._calls[name] if call is not None]
        return failed if len(failed) == self._call_window else []


def diagnose(failures: Sequence[FailedAttempt], total: int, limit: str, run: str) -> Iterator[str]:
    """Yield the lines of a diagnosis of failed attempts: each reason with its count and an example, then advice.

    ``total`` is the number of recent attempts, failed or not. ``limit`` is a text with the limit that is exceeded. For
    example, if at most half of the last 256 attempts may fail, the text is "a share of 0.5 in 256 is the limit".
    ``run`` is the name of the run.
    """
    by_reason: dict[str, list[FailedAttempt]] = {}
    for failure in failures:
        by_reason.setdefault(normalize_reason(failure.reason), []).append(failure)
    ranked = sorted(by_reason.values(), key=lambda same: -len(same))
    yield f"{len(failures)} of the last {total} attempts failed; {limit}"
    for same in ranked[:MAX_REASONS]:
        yield f"{len(same):>6} x {shorten_reason(same[0].reason)}"
        yield _example(same[0].attempt, run)
    if others := sum(map(len, ranked[MAX_REASONS:])):
        yield f"{others:>6} x {len(ranked) - MAX_REASONS} other reasons"
    yield "what to do"
    for kind in dict.fromkeys(same[0].kind for same in ranked):
        yield f"  {kind}: {ADVICE.get(kind, _ADVICE_UNSCORED)}"
    yield _OVERRIDE


def _example(attempt: AttemptId, run: str) -> str:
    return f"         for example {attempt}: agent-r1 show {run} {'.'.join(map(str, attempt.sort_key))}"


def _valid_calls(trajectory: Trajectory) -> Iterator[tuple[str, FailedToolCall | None]]:
    for turn in trajectory.turns:
        for call, result in zip(turn.action.message.calls, turn.results, strict=False):
            if result.error in _TOOL_FAILURES:
                text = next((part.text for part in result.parts if isinstance(part, Text)), "")
                yield call.name, FailedToolCall(trajectory.attempt, text)
            elif result.error not in INVALID_CALL_KINDS:
                yield call.name, None


def shorten_reason(reason: str) -> str:
    """Return the reason of a failure, cut to at most MAX_REASON_LENGTH characters.

    If a long reason ends with the place of an exception, only the text before the place is cut:
    "ValueError: a long text that is.. (agent.py:12, in find)".
    """
    text = " ".join(reason.split())
    if len(text) <= MAX_REASON_LENGTH:
        return text
    place = _PLACE.search(text)
    end = f"..{place[0]}" if place else ".."
    return text[: MAX_REASON_LENGTH - len(end)] + end


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


START_STEPS = 5
"""Number of first steps whose mean entropy is compared with later steps."""

WARN_AFTER = 5
"""The monitor warns after this number of consecutive steps with a finding."""


def check_entropy(entropy: float | None, start: Sequence[float], share: float) -> Finding | None:
    """Return a finding if the policy's entropy is too small compared with the start of the run.

    Args:
        entropy: the mean entropy of a step in nats per action token; None if the step has no entropy.
        start: the entropies of the first ``START_STEPS`` steps. With fewer entropies, there is no finding.
        share: the smallest allowed ratio of ``entropy`` to the mean of ``start``.
    """
    if entropy is None or len(start) < START_STEPS or entropy >= share * fmean(start):
        return None
    return Finding(
        check="entropy",
        what="the policy has become almost deterministic, so the attempts of a group hardly differ",
        value=f"entropy {entropy:.3g}",
        limit=f"at least {share:g} of {fmean(start):.3g}, the entropy of the first {START_STEPS} steps",
        do="if the reward is not at its maximum, lower the learning rate, raise algorithm.loss.clip_high, or set "
        "algorithm.entropy_coef",
        patience=None,
        warn_after=WARN_AFTER,
    )


def check_contrast(metrics: Mapping[str, float], share: float) -> Finding | None:
    """Return a finding if more than ``share`` of a step's groups are constant: all attempts have equal rewards."""
    constant = metrics.get("constant_groups")
    if constant is None or math.isnan(constant) or constant <= share:
        return None
    return Finding(
        check="contrast",
        what="almost all groups have attempts with equal rewards, so few groups can teach anything",
        value=f"{constant:.0%} of the groups, mean reward {metrics['reward']:.3g}",
        limit=f"at most {share:.0%}",
        do="use tasks that are solved sometimes, a larger group_size, a higher temperature, or --algorithm dapo, which "
        "refills such groups; if the reward is at its maximum, training is done",
        patience=None,
        warn_after=WARN_AFTER,
    )


def check_validation(em: float, best: float, questions: int, rewards: Sequence[float], since: int) -> Finding | None:
    """Return a finding if the validation score fell while the training reward rose.

    The score fell if ``em`` is below ``best`` by more than two standard errors of the difference of two proportions.
    Let n be the number of steps since the best validation. The reward rose if its mean over the last n steps is above
    its mean over the n steps before these steps.

    Args:
        em, best: the exact match of this validation, and of the best validation.
        questions: the number of validation questions.
        rewards: the mean rewards of the last steps, oldest first.
        since: n, the number of steps since the best validation.
    """
    pooled = (em + best) / 2
    margin = 2 * math.sqrt(2 * pooled * (1 - pooled) / max(questions, 1))
    after = [reward for reward in rewards[len(rewards) - since :] if math.isfinite(reward)]
    before = [reward for reward in rewards[: len(rewards) - since][-since:] if math.isfinite(reward)]
    if since < 1 or em >= best - margin or not before or not after or fmean(after) <= fmean(before):
        return None
    return Finding(
        check="validation",
        what="it falls while the training reward rises: the policy overfits, or exploits a reward",
        value=f"exact match {em:.3g}; mean reward {fmean(before):.3g} before the best step, {fmean(after):.3g} since",
        limit=f"at least {best - margin:.3g}: the best was {best:.3g}, {since} steps ago",
        do="RUN/model will have the best step; take fewer steps or a lower learning rate, and look at attempts with "
        "high rewards",
        patience=None,
    )


PROXY, TRUE, CORRELATION = "proxy/reward", "proxy/true_reward", "proxy/correlation"
"""The names of the metrics of :func:`proxy_metrics`."""

ERRORS = 2.0
"""A change of a mean reward counts if it exceeds this number of standard errors."""


def proxy_metrics(batch: Sequence[SelectedGroup], true_reward: str) -> dict[str, float]:
    """Return three metrics of a step: mean return, mean true reward, and the correlation of return and true reward.

    The argument ``true_reward`` is the name of the true reward. Attempts without this reward are ignored. If no attempt
    has this reward, return {}. The correlation is left out if all returns or all true rewards are equal.
    """
    pairs = [
        (sample.total, true)
        for selected in batch
        for sample in selected.selection.samples
        if (true := _value(sample.trajectory, true_reward)) is not None
    ]
    if not pairs:
        return {}
    proxies, trues = zip(*pairs, strict=True)
    metrics = {PROXY: fmean(proxies), TRUE: fmean(trues)}
    spread = pstdev(proxies) * pstdev(trues)
    if spread > 0:
        covariance = fmean((proxy - metrics[PROXY]) * (true - metrics[TRUE]) for proxy, true in pairs)
        metrics[CORRELATION] = covariance / spread
    return metrics


def _value(trajectory: Trajectory, name: str) -> float | None:
    values = [one.value for one in weighted_rewards(trajectory, {}) if one.name == name]
    return math.fsum(values) if values and all(map(can_be_summed, values)) else None


def check_reward_hacking(history: Sequence[tuple[float, float]], window: int) -> Finding | None:
    """Return a finding if the true reward fell while the return rose. The policy is trained on the return.

    Two periods of ``window`` consecutive steps are compared: the last steps, and the earlier period with the highest
    mean true reward. The fall and the rise must each exceed the standard error times ``ERRORS``. The standard error is
    estimated from the spread of the steps.

    ``history`` has (mean return, mean true reward) of each step, oldest first. ``window`` is at least 2.
    """
    if len(history) < 2 * window:
        return None
    recent = history[-window:]
    starts = range(len(history) - 2 * window + 1)
    best = max((history[start : start + window] for start in starts), key=lambda steps: fmean(s[1] for s in steps))
    rise, fall = _change(best, recent, 0), _change(best, recent, 1)
    if rise <= 0 or fall >= 0:
        return None
    return Finding(
        check="reward_hacking",
        what="the reward rises while the true reward falls: the policy exploits the reward",
        value=f"reward {_mean(best, 0):.3g} to {_mean(recent, 0):.3g}, true reward {_mean(best, 1):.3g} to "
        f"{_mean(recent, 1):.3g}",
        limit=f"means of {window} steps, now and at the highest true reward",
        do="stop here, look at attempts with a high reward and a low true reward ('agent-r1 show RUN --attempts --sort "
        "-reward'), and change the reward; a smaller weight or a KL penalty only slows it down",
        patience=None,
    )


def _mean(steps: Sequence[tuple[float, float]], index: int) -> float:
    return fmean(step[index] for step in steps)


def _change(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]], index: int) -> float:
    difference = _mean(after, index) - _mean(before, index)
    squared = sum(variance(step[index] for step in steps) / len(steps) for steps in (before, after))
    return difference if abs(difference) > ERRORS * math.sqrt(squared) else 0.0


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state of a health monitor, saved in each checkpoint.

    The entries of each tuple are in the order of the training steps.

    Attributes:
        groups: the number of checked groups. The next group has this number as its id.
        streaks: the number of consecutive steps with a finding, by the name of the check.
        start_entropies: the entropies of the first steps.
        validation_warned: the training step that had the best validation score when the monitor last warned that the
            score fell. 0 if the monitor never warned that the score fell.
        proxies: (mean return, mean true reward) of each recent step; () without the setting ``monitor.true_reward``.

    Example:
        MonitorState(groups=16, gradient_norms=(0.42, 0.4), streaks={"logprob_gap": 2})
    """

    groups: int = 0
    breaker: CircuitBreakerState = field(default_factory=CircuitBreakerState)
    gradient_norms: tuple[float, ...] = ()
    streaks: Mapping[str, int] = field(default_factory=dict)
    start_entropies: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()
    validation_warned: int = 0
    proxies: tuple[tuple[float, float], ...] = ()
    hacking_warned: bool = False


_log = logging.getLogger(__name__)

MAX_WINDOW_STEPS = 3
"""The maximum size, in steps, of the window of recent attempts in which the circuit breaker counts failures.

A short run would end before a larger window is full.
"""

REWARD_HISTORY = 1000

MIN_WINDOW_GROUPS, MIN_WINDOW_ATTEMPTS = 4, 32
"""The minimum size of the circuit breaker's window: the attempts in 4 groups or 32 attempts, whichever is smaller."""


class HealthMonitor:
    """A monitor that looks for problems of a training run. A problem leads to a warning, or stops the run.

    The monitor checks each group before the trainer uses the group, and each training step after the step has ended.
    """

    def __init__(self, config: TrainConfig, updater: PolicyUpdater, recorder: Recorder, folder: Path) -> None:
        limits = config.monitor
        self._updater, self._recorder, self._folder = updater, recorder, folder
        self._group_size = config.group_size
        # A run with few steps, for example a test run, only gets warnings.
        self._idle_patience = limits.idle_steps if config.steps > limits.idle_steps else None
        longest = config.groups_per_step * config.group_size * min(MAX_WINDOW_STEPS, config.steps)
        shortest = min(MIN_WINDOW_GROUPS * config.group_size, MIN_WINDOW_ATTEMPTS)
        window = max(min(limits.failure_window, longest), shortest)
        self._breaker = CircuitBreaker(limits.failure_share, window, run=run_argument(folder))
        trainer, engine = product_precision(config.trainer.dtype), product_precision(config.engine.dtype)
        checks = metric_checks(limits, config.max_staleness, trainer, engine)
        # Guided tokens are sampled from another distribution than the policy's, whose difference is the guidance.
        guided = config.decode.method != "plain"
        self._metric_checks = tuple(check for check in checks if not (guided and check.metric == LOGPROB_GAP))
        self._limits, self._questions = limits, config.evaluate_n
        self._start_entropies: tuple[float, ...] = ()
        self._rewards: deque[float] = deque(maxlen=REWARD_HISTORY)
        self._validation_warned = 0
        self._proxies: deque[tuple[float, float]] = deque(maxlen=REWARD_HISTORY)
        self._hacking_warned = False
        self._spikes = GradientSpikeDetector(limits.gradient_spike)
        self._micro_tokens = updater.micro_tokens
        self._groups = 0
        self._streaks: dict[str, int] = {}

    def on_group(self, selected: SelectedGroup) -> None:
        """Check a group before the trainer uses the group.

        Raises:
            RunStopped: :func:`check_group_integrity` found a problem, too many recent attempts failed, or a tool always
                fails.
        """
        finding = check_group_integrity(selected.group, self._groups, self._group_size, self._updater.needs_greedy)
        if finding is not None:
            raise self._stopped(str(finding))
        self._groups += 1
        diagnosis = self._breaker.record(selected.group, selected.selection.excluded)
        if diagnosis is not None:
            raise self._stopped(diagnosis)

    def on_step(self, update: UpdateReport, served: PolicyVersion) -> tuple[Finding, ...]:
        """Check a training step, and return the findings to report.

        ``served`` is the version of the engine's weights after the update.
        """
        before, self._micro_tokens = self._micro_tokens, update.micro_tokens
        results = (
            check_weights(served, self._updater.publish().version),
            check_no_signal(update, self._idle_patience),
            check_memory_reduced(before, update.micro_tokens),
            self._spikes.check(update.metrics),
            check_critic(update.metrics, self._limits.critic_steps),
            check_effective_share(update.metrics),
            check_entropy(update.metrics.get("entropy"), self._start_entropies, self._limits.entropy_share),
            check_contrast(update.metrics, self._limits.constant_share),
            *tool_warnings(self._breaker),
            *(check.check(update.metrics) for check in self._metric_checks),
        )
        self._rewards.append(update.metrics["reward"])
        if "entropy" in update.metrics and len(self._start_entropies) < START_STEPS:
            self._start_entropies += (update.metrics["entropy"],)
        findings = tuple(finding for finding in results if finding is not None)
        self._streaks = {finding.check: self._streaks.get(finding.check, 0) + 1 for finding in findings}
        return tuple(finding for finding in findings if self._streaks[finding.check] >= finding.warn_after)

    def on_validation(self, step: int, em: float, best_step: int, best: float) -> tuple[Finding, ...]:
        """Return a finding if the validation score fell below the best score while the training reward rose.

        ``em`` is the exact match after ``step``. ``best`` is the highest exact match so far, which was measured after
        ``best_step``. At most one finding is returned for each ``best_step``.
        """
        finding = check_validation(em, best, self._questions, tuple(self._rewards), step - best_step)
        if finding is None or self._validation_warned == best_step:
            return ()
        self._validation_warned = best_step
        return (finding,)

    def on_proxy(self, metrics: Mapping[str, float]) -> tuple[Finding, ...]:
        """Return a finding the first time that the policy seems to exploit its reward.

        ``metrics`` are the :func:`~agent_r1.training.monitor.proxy_metrics` of the step.
        """
        if TRUE not in metrics:
            return ()
        self._proxies.append((metrics[PROXY], metrics[TRUE]))
        finding = check_reward_hacking(tuple(self._proxies), self._limits.true_reward_steps)
        if finding is None or self._hacking_warned:
            return ()
        self._hacking_warned = True
        return (finding,)

    async def report(self, findings: Sequence[Finding]) -> None:
        """Record the findings of the last step as warnings, and print them.

        Raises:
            RunStopped: a check had findings in ``Finding.patience`` consecutive steps.
        """
        await self._recorder.record(*(LogEvent("warning", str(finding)) for finding in findings))
        for finding in findings:
            streak = self._streaks.get(finding.check, 1)
            if finding.patience is not None and streak >= finding.patience:
                raise self._stopped(f"{streak} steps in a row, {finding}" if streak > 1 else str(finding))
            _log.warning("%s", finding)

    def state(self) -> MonitorState:
        return MonitorState(
            groups=self._groups,
            breaker=self._breaker.state(),
            gradient_norms=tuple(self._spikes.norms),
            streaks=self._streaks,
            start_entropies=self._start_entropies,
            rewards=tuple(self._rewards),
            validation_warned=self._validation_warned,
            proxies=tuple(self._proxies),
            hacking_warned=self._hacking_warned,
        )

    def load_state(self, state: MonitorState) -> None:
        """Continue from ``state``. Call this method before the first group is checked."""
        self._groups, self._streaks = state.groups, dict(state.streaks)
        self._breaker.load_state(state.breaker)
        self._spikes.norms.extend(state.gradient_norms)
        self._start_entropies, self._validation_warned = state.start_entropies, state.validation_warned
        self._rewards.extend(state.rewards)
        self._proxies.extend(state.proxies)
        self._hacking_warned = state.hacking_warned

    def _stopped(self, reason: str) -> RunStopped:
        version = self._updater.publish().version.number
        return RunStopped(
            f"the run was stopped: {reason}\n"
            f"The weights are version {version}, unchanged since. The recorded attempts are in {self._folder}: "
            f"agent-r1 show {self._breaker.run} --attempts"
        )
