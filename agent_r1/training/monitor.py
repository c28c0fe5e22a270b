"""The health monitor of a training run: it warns of problems, and stops a run that cannot go well.

- ``failures``: too many attempts failed, or a tool always fails. Stops the run before it trains on the group.
- ``weights``: the engine does not serve the published weights. Stops the run at once.
- ``logprob_gap``, ``skipped_steps``: engine and trainer disagree, or gradients are not finite. Stop the run after
  ``monitor.patience`` consecutive steps.
- ``calls``, ``contrast``, ``entropy``, ``validation``, ``reward_hacking``, ``memory``: warnings.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

from agent_r1.core.errors import RunStopped
from agent_r1.core.events import LogEvent, Recorder
from agent_r1.core.inference import PolicyVersion
from agent_r1.core.messages import Text
from agent_r1.core.trajectory import STATUS_POLICY, AttemptId, Group, Status, Trajectory, can_be_summed
from agent_r1.data.batch import Excluded, describe_status
from agent_r1.model.weights import product_precision
from agent_r1.store.folder import run_argument
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind
from agent_r1.trainer.updater import SelectedGroup, Trained, UpdateReport
from agent_r1.training.config import TrainConfig
from agent_r1.training.metrics import EXACT_MATCH_NAMES, sum_rewards

_log = logging.getLogger(__name__)

MAX_REASON_LENGTH = 110

_PLACE = re.compile(r" \([^()]{1,50}:\d+, in [^()]{1,30}\)$")  # as " (agent.py:12, in find)"


def normalize_reason(reason: str) -> str:
    """Return the reason of a failure, shortened, with each number replaced by ``#``."""
    shortened = " ".join(reason.split())[:MAX_REASON_LENGTH]
    return re.sub(r"0x[0-9a-f]+|\d+(?:\.\d+)?", "#", shortened)


def shorten_reason(reason: str) -> str:
    """Return the reason of a failure, cut in its middle to at most MAX_REASON_LENGTH characters.

    What is wrong often stands at the end, and so does the place of an exception, which is never cut:
    "reward right could not be scored: AttributeErr..o attribute 'final_text' (agent.py:12, in find)".
    """
    text = " ".join(reason.split())
    if len(text) <= MAX_REASON_LENGTH:
        return text
    found = _PLACE.search(text)
    place = found[0] if found else ""
    text = text.removesuffix(place)
    room = MAX_REASON_LENGTH - len(place) - len("..")
    return f"{text[: room - room // 2]}..{text[len(text) - room // 2 :]}{place}"


# Failures of attempts and tools

CALL_WINDOW = 64  # consecutive calls of one tool that failed for the same cause: the run is stopped
MAX_CAUSES = 5  # in a diagnosis

UNSCORED, TOOL = "unscored", "tool"

ADVICE: Mapping[str, str] = {
    Status.ENVIRONMENT_FAILED: "the environment or your agent raised: run it by hand with the example's task",
    Status.ENGINE_FAILED: "the engine could not generate: if memory ran out, lower --concurrency or --context",
    Status.REWARD_FAILED: "a scorer raised or took too long: call it on the example's trajectory, see --score_seconds; "
    "or turns could not be valued, see the reason: draw what is random in the environment from RolloutContext.seed",
    Status.CANCELLED: "by the engine, or after --episode_seconds, see the reason: find what hangs, or raise the limit",
    UNSCORED: "a reward function raised or returned no finite number, or the policy sampled no token: "
    "test the function (docs/rewards.md)",
    TOOL: "the tool always fails: call it by hand; for errors of the agent it should return text instead of raising",
}
"""What to do, by the kind of a failure."""

_TOOL_FAILURES = frozenset({ToolErrorKind.RAISED, ToolErrorKind.TIMED_OUT, ToolErrorKind.BAD_RESULT})


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An attempt that cannot be trained on, or a valid call whose tool failed. ``kind`` is a key of ``ADVICE``."""

    attempt: AttemptId
    kind: str
    reason: str

    @property
    def cause(self) -> str:
        """The normalized reason. Failures with equal causes are counted together."""
        # After the second colon, the error of a tool often quotes its arguments: "search failed: KeyError: 'Alba'".
        reason = ": ".join(self.reason.split(": ")[:2]) if self.kind == TOOL else self.reason
        return normalize_reason(reason)


@dataclass(frozen=True, slots=True)
class MonitorState:
    """The state of a health monitor, saved in each checkpoint. Tuples are in the order of training, oldest first."""

    attempts: tuple[FailureRecord | None, ...] = ()  # the recent attempts; None: the attempt did not fail
    # the recent calls by tool; None: the call did not fail
    calls: Mapping[str, tuple[FailureRecord | None, ...]] = field(default_factory=dict)
    # the number of consecutive steps with a finding, by the name of the check
    streaks: Mapping[str, int] = field(default_factory=dict)
    start_entropies: tuple[float, ...] = ()  # the entropies of the first steps
    rewards: tuple[float, ...] = ()  # the mean rewards of the recent steps
    # (mean return, mean true reward) of each recent step; () without the setting ``monitor.true_reward``
    proxies: tuple[tuple[float, float], ...] = ()
    validation_warned: int = 0  # the step of the best validation at the last warning that validation falls; 0 before it
    hacking_warned: bool = False
    # the number of steps in which the check warned or would have warned again, by the name of the check
    warnings: Mapping[str, int] = field(default_factory=dict)


def record_group(state: MonitorState, group: Group, excluded: Sequence[Excluded], window: int) -> MonitorState:
    """Return the state after a group, of which ``excluded`` are the attempts that cannot be trained on."""
    unscored = {one.attempt: one.reason for one in excluded}
    attempts, calls = list(state.attempts), {name: list(some) for name, some in state.calls.items()}
    for trajectory in group.trajectories if group.greedy is None else (*group.trajectories, group.greedy):
        attempt, failure = trajectory.attempt, None
        if STATUS_POLICY[trajectory.status] != "train":
            failure = FailureRecord(attempt, str(trajectory.status), describe_status(trajectory))
        elif attempt in unscored:
            failure = FailureRecord(attempt, UNSCORED, unscored[attempt])
        attempts.append(failure)
        for turn in trajectory.turns:
            for call, result in zip(turn.action.message.calls, turn.results, strict=False):
                if result.error in INVALID_CALL_KINDS:
                    continue  # an error of the policy, which training should correct
                text = next((part.text for part in result.parts if isinstance(part, Text)), "")
                failure = FailureRecord(attempt, TOOL, text) if result.error in _TOOL_FAILURES else None
                calls.setdefault(call.name, []).append(failure)
    recent = {name: tuple(some[-CALL_WINDOW:]) for name, some in calls.items()}
    return replace(state, attempts=tuple(attempts[-window:]), calls=recent)


def diagnose(state: MonitorState, share: float, window: int, run: str) -> str | None:
    """Return why the run must be stopped, with examples and advice; None if it may continue.

    More than ``share`` of ``window`` attempts failed, or the last ``CALL_WINDOW`` calls of a tool failed for one cause.
    """
    if share == 1:
        return None
    failures = [attempt for attempt in state.attempts if attempt is not None]
    if len(failures) > share * window:
        limit = f"a share of {share:g} in {window} is the limit"
        return _diagnosis(f"{len(failures)} of the last {len(state.attempts)} attempts failed; {limit}", failures, run)
    for name, calls in state.calls.items():
        failed = [call for call in calls if call is not None]
        # Different causes can be errors of the agent, from which it can learn.
        if len(failed) == CALL_WINDOW and len({call.cause for call in failed}) == 1:
            return _diagnosis(
                f"the last {len(failed)} calls of the tool {name!r} all failed, for one cause", failed, run
            )
    return None


def _diagnosis(head: str, failures: Sequence[FailureRecord], run: str) -> str:
    causes: dict[str, list[FailureRecord]] = {}
    for failure in failures:
        causes.setdefault(failure.cause, []).append(failure)
    ranked = sorted(causes.values(), key=lambda same: -len(same))
    lines = [head]
    for same in ranked[:MAX_CAUSES]:
        attempt = same[-1].attempt
        example = f"agent-r1 show {run} {'.'.join(map(str, attempt.sort_key))}"
        lines += [f"{len(same):>6} x {shorten_reason(same[-1].reason)}", f"         for example {attempt}: {example}"]
    if others := sum(map(len, ranked[MAX_CAUSES:])):
        lines.append(f"{others:>6} x {len(ranked) - MAX_CAUSES} other causes")
    kinds = dict.fromkeys(same[0].kind for same in ranked)
    lines += ["what to do", *(f"  {kind}: {ADVICE[kind]}" for kind in kinds)]
    return "\n".join([*lines, "  to continue nevertheless: --monitor.failure_share 1"])


# Checks of a step

LOGPROB_GAP = "logprob_gap"
"""The name of the metric for the largest difference between a token's log-probabilities in engine and trainer."""

START_STEPS = 5  # the mean entropy of these first steps is compared with later steps
MIN_ENTROPY_SHARE = 0.1
MAX_CONSTANT_SHARE = 0.9
WARN_AFTER = 5  # consecutive steps with low entropy or contrast before a warning, because single steps vary
MAX_REWARDS = 3  # that a finding names
MIN_CALLS = 8  # a step with fewer calls says little about them


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check found in a step."""

    check: str  # the name of the check
    text: str  # the problem, the measured value and its limit, and advice
    # the run is stopped after this number of consecutive steps with the finding; None: only warn
    patience: int | None = None
    warn_after: int = 1  # the monitor warns after this number of consecutive steps

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


def check_weights(served: PolicyVersion, published: PolicyVersion) -> Finding | None:
    """Return a finding if the engine does not serve the published weights."""
    if (served.number, served.checksum) == (published.number, published.checksum):
        return None
    text = (
        "the engine does not serve the weights that the trainer published "
        f"(version {served.number}, checksum {(served.checksum or 'none')[:12]}; published: version "
        f"{published.number}, checksum {(published.checksum or 'none')[:12]}); report it, with the engine in use: "
        "attempts would be sampled from other weights than recorded"
    )
    return Finding("weights", text, patience=1)


def check_logprob_gap(metrics: Mapping[str, float], limit: float, patience: int) -> Finding | None:
    """Return a finding if engine and trainer disagree on the log-probability of a token by more than ``limit``."""
    gap = metrics.get(LOGPROB_GAP)
    # If older weights sampled a token, the gap contains the change of the policy since then: nothing is wrong.
    # The comparison with NaN is false, so a gap of NaN is a finding.
    if gap is None or metrics["staleness"] > 0 or gap <= limit:
        return None
    text = (
        f"engine and trainer disagree on the log-probability of sampled tokens ({gap:.3g}; at most {limit:g}); "
        "compare their weights, temperature and attention; training with this gap is biased"
    )
    return Finding(LOGPROB_GAP, text, patience)


def check_finite(metrics: Mapping[str, float], patience: int) -> Finding | None:
    """Return a finding if an optimizer step was skipped, because its loss or gradient was not finite."""
    if not metrics.get("skipped_steps"):
        return None
    text = (
        "a loss or gradient was not finite, so optimizer steps were skipped; lower the learning rates, and look at the "
        "rewards of the attempts that were dropped"
    )
    return Finding("skipped_steps", text, patience)


def describe_attempts(attempts: Sequence[Trajectory], max_tokens: int, has_tools: bool) -> str:
    """Return what attempts did, as a hint why none taught anything: cut answers, calls, and rewards that are constant.

    Example: "; 14 of 16 attempts were cut at max_tokens 32; 2 had a valid call; reward right was 0 in all".
    """
    facts = []
    cut = sum(one.status is Status.OUT_OF_TOKENS for one in attempts)
    if cut:
        facts.append(f"{cut} of {len(attempts)} attempts were cut (max_tokens {max_tokens})")
    if has_tools:
        results = [[result.error for turn in one.turns for result in turn.results] for one in attempts]
        valid = sum(any(error not in INVALID_CALL_KINDS for error in errors) for errors in results)
        facts.append(f"{valid} of {len(attempts)} had a valid call")
    totals = [sum_rewards(one) for one in attempts if one.rewards]
    for name in list(dict.fromkeys(name for total in totals for name in total))[:MAX_REWARDS]:
        if len(values := {total.get(name) for total in totals}) == 1 and (value := values.pop()) is not None:
            facts.append(f"reward {name} was {value:g} in all")
    return "".join(f"; {fact}" for fact in facts)


def check_calls(attempts: Sequence[Trajectory], tools: Sequence[str]) -> Finding | None:
    """Return a finding if every call of a step was invalid: it could not be read, or no tool accepts it.

    ``tools`` has the names of the run's tools; () if each task has its own.
    """
    calls = [
        (call.name, result)
        for one in attempts
        for turn in one.turns
        for call, result in zip(turn.action.message.calls, turn.results, strict=False)
    ]
    if len(calls) < MIN_CALLS or any(result.error not in INVALID_CALL_KINDS for _, result in calls):
        return None
    unknown = Counter(name for name, result in calls if result.error == ToolErrorKind.UNKNOWN_TOOL)
    named = (
        f"{unknown.total()} name a tool that does not exist, such as {unknown.most_common(1)[0][0]!r}; "
        if unknown
        else ""
    )
    reason = next((part.text for part in calls[-1][1].parts if isinstance(part, Text)), "")
    if tools:
        named += f"the tools are: {', '.join(tools)}; "
    text = f"all {len(calls)} calls of the step are invalid; {named}the last was told: {shorten_reason(reason)}"
    return Finding("calls", text)


def check_contrast(update: UpdateReport, attempts: str = "") -> Finding | None:
    """Return a finding if a step had hardly anything to learn from."""
    metrics, advice = update.metrics, "; if the reward is at its maximum, training is done"
    untrained = [one.reason for one in update.outcomes if not isinstance(one, Trained)]
    if len(untrained) == len(update.outcomes) and not metrics.get("skipped_steps"):
        if 2 * metrics["failed"] > len(untrained):
            advice = "; remove the cause of the failures: most attempts could not be trained"
        else:
            advice = "; use tasks that are solved sometimes, other rewards, or a larger group_size" + advice
        counts = Counter(map(normalize_reason, untrained)).most_common(3)
        reasons = ", ".join(f"{count} x {reason}" for reason, count in counts)
        return Finding("contrast", f"no attempt of the step was trained ({reasons}){attempts}{advice}")
    constant = metrics.get("constant_groups", math.nan)
    if not constant > MAX_CONSTANT_SHARE:  # NaN: no group has two attempts
        return None
    text = (
        f"{constant:.0%} of the groups have attempts with equal rewards (at most {MAX_CONSTANT_SHARE:.0%}), so few "
        "groups can teach anything; use tasks that are solved sometimes, a larger group_size, a higher temperature, or "
        f"--algorithm dapo, which refills such groups{advice}"
    )
    return Finding("contrast", text, warn_after=WARN_AFTER)


def check_entropy(entropy: float | None, start: Sequence[float]) -> Finding | None:
    """Return a finding if the entropy of a step is far below its mean in the ``start`` of the run."""
    if entropy is None or len(start) < START_STEPS or entropy >= MIN_ENTROPY_SHARE * fmean(start):
        return None
    text = (
        "the policy has become almost deterministic, so the attempts of a group hardly differ "
        f"(entropy {entropy:.3g}, {fmean(start):.3g} in the first {START_STEPS} steps); if the reward is not at its "
        "maximum, lower the learning rate, raise algorithm.loss.clip_high, or set algorithm.entropy_coef"
    )
    return Finding("entropy", text, warn_after=WARN_AFTER)


def check_memory(micro_tokens: int, configured: int) -> Finding | None:
    """Return a finding if memory ran out in an update, so that the micro-batches became smaller than configured."""
    if micro_tokens >= configured:
        return None
    # The sums of smaller micro-batches differ in their last bits: the user should know, and pay for the retry once.
    text = (
        f"memory ran out in an update, so micro-batches have {micro_tokens} tokens instead of {configured}; "
        f"set trainer.micro_tokens to {micro_tokens}, so that the next run starts with it"
    )
    return Finding("memory", text)


def check_validation(em: float, best: float, questions: int, rewards: Sequence[float], since: int) -> Finding | None:
    """Return a finding if the validation score fell while the training reward rose.

    The exact match ``em`` of ``questions`` fell if it is below ``best`` by more than two standard errors of the
    difference of two proportions. The reward rose if its mean over the ``since`` steps after the best validation is
    above that of as many steps before.
    """
    pooled = (em + best) / 2
    margin = 2 * math.sqrt(2 * pooled * (1 - pooled) / max(questions, 1))
    after = [reward for reward in rewards[len(rewards) - since :] if math.isfinite(reward)]
    before = [reward for reward in rewards[: len(rewards) - since][-since:] if math.isfinite(reward)]
    if since < 1 or em >= best - margin or not before or not after or fmean(after) <= fmean(before):
        return None
    text = (
        f"it falls (exact match {em:.3g}; the best was {best:.3g}, {since} steps ago) while the training reward rises "
        f"({fmean(before):.3g} before the best step, {fmean(after):.3g} since): the policy overfits, or exploits a "
        "reward; RUN/model will have the best step; take fewer steps or a lower learning rate, and look at attempts "
        "with high rewards"
    )
    return Finding("validation", text)


# Reward hacking: the return, on which the policy is trained, is only a proxy of the true reward.

PROXY, TRUE, CORRELATION = "proxy/reward", "proxy/true_reward", "proxy/correlation"
"""The names of the metrics of :func:`proxy_metrics`."""

# Early steps can change much, so few of them are the best period; single steps vary, so the latest period has more.
BEST_STEPS, RECENT_STEPS = 2, 5
ERRORS = 3.5  # a change of a mean reward counts if it exceeds this number of standard errors


def true_reward(config: TrainConfig, rewards: Sequence[str]) -> str:
    """Return the reward that the monitor trusts. ``rewards`` is () if their names are known only after scoring."""
    names = [name for name in EXACT_MATCH_NAMES if not rewards or name in rewards]
    unused = [name for name in names if config.reward_weights.get(name) == 0]
    return config.monitor.true_reward or next(iter(unused), "")


def proxy_metrics(batch: Sequence[SelectedGroup], true_reward: str) -> dict[str, float]:
    """Return mean return, mean true reward, and their correlation if both vary; {} without a true reward."""
    pairs = [
        (sample.total, true)
        for selected in batch
        for sample in selected.selection.samples
        if (true := sum_rewards(sample.trajectory).get(true_reward)) is not None and can_be_summed(true)
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


def check_reward_hacking(history: Sequence[tuple[float, float]]) -> Finding | None:
    """Return a finding if the true reward fell while the return rose.

    The last ``RECENT_STEPS`` steps are compared with the ``BEST_STEPS`` earlier steps of the highest mean true reward.
    Fall and rise must each exceed ``ERRORS`` times the standard error.
    """
    if len(history) < BEST_STEPS + RECENT_STEPS:
        return None
    proxies, trues = zip(*history, strict=True)
    starts = range(len(history) - RECENT_STEPS - BEST_STEPS + 1)
    start = max(starts, key=lambda start: fmean(trues[start : start + BEST_STEPS]))
    (rise, *returns), (fall, *truths) = _change(proxies, start), _change(trues, start)
    if rise <= ERRORS or fall >= -ERRORS:
        return None
    text = (
        "the reward rises while the true reward falls: the policy exploits the reward (reward "
        f"{returns[0]:.3g} to {returns[1]:.3g}, true reward {truths[0]:.3g} to {truths[1]:.3g}; means of the "
        f"{BEST_STEPS} steps of the highest true reward, and of the last {RECENT_STEPS}); stop here, look at attempts "
        "with a high reward and a low true reward, and change the reward; a smaller weight or a KL penalty only slows "
        "it down"
    )
    return Finding("reward_hacking", text)


def _change(means: Sequence[float], start: int) -> tuple[float, float, float]:
    # (change in standard errors, mean of the best steps, which begin at ``start``, mean of the recent steps)
    old, new = fmean(means[start : start + BEST_STEPS]), fmean(means[-RECENT_STEPS:])
    # Differences of neighbors give the variance of a step also if the mean drifts (von Neumann 1941).
    variance = fmean((after - before) ** 2 for before, after in pairwise(means)) / 2
    error = math.sqrt(variance * (1 / BEST_STEPS + 1 / RECENT_STEPS))
    return (new - old) / error if error else 0.0, old, new


HISTORY = 1000  # recent steps whose rewards are compared


class HealthMonitor:
    """Checks each group before the trainer uses it, and each step. ``state`` is the state for the next checkpoint."""

    def __init__(
        self, config: TrainConfig, recorder: Recorder, folder: Path, state: MonitorState, tools: Sequence[str] = ()
    ) -> None:
        self._config, self._limits, self._recorder, self._folder = config, config.monitor, recorder, folder
        self.state, self._tools = state, tools
        # Failures are counted in at most three steps, because a short run would end before a larger window is full,
        # but in at least four groups, because one error of a scorer fails all attempts of a group.
        longest = min(256, config.groups_per_step * config.group_size * min(3, config.steps))
        self._window = max(longest, min(4 * config.group_size, 32))
        precisions = product_precision(config.trainer.dtype), product_precision(config.engine.dtype)
        self._gap_limit = self._limits.gap_limit(*precisions)

    def on_group(self, selected: SelectedGroup) -> None:
        """Raise RunStopped if too many recent attempts failed, or if a tool always fails."""
        self.state = record_group(self.state, selected.group, selected.selection.excluded, self._window)
        run = run_argument(self._folder)
        if diagnosis := diagnose(self.state, self._limits.failure_share, self._window, run):
            raise self._stopped(diagnosis)

    def on_end(self) -> None:
        """Raise RunStopped if every attempt failed in a run that was too short for :meth:`on_group` to stop it."""
        attempts = self.state.attempts
        if attempts and None not in attempts:
            diagnosis = diagnose(self.state, self._limits.failure_share, len(attempts), run_argument(self._folder))
            if diagnosis is not None:
                raise self._stopped(diagnosis)

    def _checks_of_attempts(self, update: UpdateReport, attempts: Sequence[Trajectory]) -> Iterable[Finding | None]:
        read = f"; read one: agent-r1 show {run_argument(self._folder)} worst"
        described = describe_attempts(attempts, self._config.max_tokens, bool(self._tools))
        yield check_contrast(update, described + read)
        yield check_entropy(update.metrics.get("entropy"), self.state.start_entropies)

    def on_step(
        self,
        update: UpdateReport,
        attempts: Sequence[Trajectory],
        served: PolicyVersion,
        published: PolicyVersion,
        proxy: Mapping[str, float],
    ) -> list[Finding]:
        """Check a training step on ``attempts``, and return the findings to report.

        ``served`` is the version of the engine's weights after the update, ``published`` the version of the trainer's
        weights, and ``proxy`` the result of :func:`proxy_metrics`, or {} without a true reward.
        """
        state, metrics = self.state, update.metrics
        entropy, starts = metrics.get("entropy"), state.start_entropies
        proxies = state.proxies + (((proxy[PROXY], proxy[TRUE]),) if proxy else ())
        results: Iterable[Finding | None] = (
            check_weights(served, published),
            check_finite(metrics, self._limits.patience),
            check_logprob_gap(metrics, self._gap_limit, self._limits.patience),
            check_calls(attempts, self._tools),
            *(self._checks_of_attempts(update, attempts) if self._config.acts else ()),
            check_memory(update.micro_tokens, self._config.trainer.micro_tokens),
            None if state.hacking_warned else check_reward_hacking(proxies),
        )
        findings = [finding for finding in results if finding is not None]
        streaks = {finding.check: state.streaks.get(finding.check, 0) + 1 for finding in findings}
        due = [finding.check for finding in findings if streaks[finding.check] >= finding.warn_after]
        self.state = replace(
            state,
            streaks=streaks,
            warnings={**state.warnings, **{check: state.warnings.get(check, 0) + 1 for check in due}},
            start_entropies=starts if entropy is None or len(starts) == START_STEPS else (*starts, entropy),
            rewards=(*state.rewards, metrics["reward"])[-HISTORY:],
            proxies=proxies[-HISTORY:],
            hacking_warned=state.hacking_warned or any(finding.check == "reward_hacking" for finding in findings),
        )
        return findings

    def on_validation(self, step: int, em: float, best_step: int, best: float) -> list[Finding]:
        """Return a finding, once for each best step, if validation fell while the training reward rose."""
        finding = check_validation(em, best, self._config.evaluate_n, self.state.rewards, step - best_step)
        if finding is None or self.state.validation_warned == best_step:
            return []
        self.state = replace(self.state, validation_warned=best_step)
        return [finding]

    async def report(self, findings: Sequence[Finding]) -> None:
        """Record and print the findings of the last step as warnings.

        A check of each step warns in the 1st, 10th, 100th, .. step in which it could: a warning at every step hides the
        others. A falling validation is a new warning each time.

        Raises RunStopped if a check had findings in ``Finding.patience`` consecutive steps.
        """
        reasons = []
        for finding in findings:
            streak = self.state.streaks.get(finding.check, 1)
            if finding.patience is not None and streak >= finding.patience:
                reasons.append(f"{streak} steps in a row, {finding}" if streak > 1 else str(finding))
            elif streak >= finding.warn_after:
                times = self.state.warnings.get(finding.check, 1)
                if times in (1, 10, 100, 1000):
                    again = f" (in {times} steps so far)" if times > 1 else ""
                    await self._recorder.record(LogEvent("warning", f"{finding}{again}"))
                    _log.warning("%s%s", finding, again)
        if reasons:
            raise self._stopped(reasons[0])

    def _stopped(self, reason: str) -> RunStopped:
        show = f"agent-r1 show {run_argument(self._folder)}"
        return RunStopped(f"the run was stopped: {reason}\nThe recorded attempts are in {self._folder}: {show}")
