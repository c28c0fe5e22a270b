"""Sums of the rewards of an episode, and their means over attempts."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.core.trajectory import STATUS_POLICY, Group, Status, Trajectory, can_be_summed, weighted_rewards
from agent_r1.rewards.scoring import normalize
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS

REWARD_MEAN = "reward/"
"""The prefix of metrics that are means of rewards, such as ``reward/em``."""

ENV_REWARD, ENV_EM, ENV_CONSTANT = "env_reward/", "env_em/", "env_constant_groups/"
"""Prefixes of metrics of one of several environments, such as ``env_reward/calc``: mean reward, mean exact match, and
the share of groups whose attempts have equal rewards."""

VALIDATION_SUBSET = "validation_em/"
"""The prefix of the exact match on a subset of the validation tasks, such as ``validation_em/three-hop``."""

RewardTotals = Mapping[str, float | None]
"""The total of each reward of an episode, by name; None if it could not be computed."""


def sum_rewards(trajectory: Trajectory) -> RewardTotals:
    """Return the total of each reward by name: of the trajectory, all turns and all calls together."""
    totals: dict[str, float | None] = {
        name: None if value is None else 0.0 for name, value in trajectory.rewards.items()
    }
    for reward in weighted_rewards(trajectory, {}):
        if (total := totals.get(reward.name, 0.0)) is not None:
            totals[reward.name] = total + reward.value
    return totals


def reward_means(by_env: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """Return the mean of each reward over the scored attempts of each environment, as metrics named ``reward/NAME``.

    A missing reward counts as 0 in an environment in which another attempt has it. A reward
    that is not a finite number is left out of its mean.
    """
    found: dict[str, list[float]] = {}
    for trajectories in by_env:
        totals = [sum_rewards(trajectory) for trajectory in trajectories if trajectory.rewards]
        for name in dict.fromkeys(name for total in totals for name, value in total.items() if value is not None):
            values = (total.get(name, 0.0) for total in totals)
            found.setdefault(name, []).extend(v for v in values if v is not None and can_be_summed(v))
    return {f"{REWARD_MEAN}{name}": math.fsum(values) / len(values) for name, values in found.items() if values}


EXACT_MATCH = "exact match"

EXACT_MATCH_NAMES = ("em", "exact_match")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The evaluation of one attempt."""

    em: float  # exact match, or the first reward if the task set reports no exact match
    f1: float  # F1; equal to ``em`` if the task set reports no F1
    sub: float | None = None  # 1 if a right answer occurs in the given answer, else 0; None if not reported
    measure: str = EXACT_MATCH  # the name of the number ``em``: "exact match", or a reward such as "reward 'solved'"
    # why the attempt failed or could not be scored; None if scored. The numbers of a failed attempt mean nothing
    failure: str | None = None

    @property
    def exact(self) -> bool:
        return self.measure == EXACT_MATCH


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k attempts at a question is right.

    The estimate is 1 - C(attempts - right, k) / C(attempts, k) (Chen et al. 2021, arXiv:2107.03374, equation 1). k is
    at most ``attempts``, the number of observed attempts.

    Example:
        >>> pass_at_k(attempts=4, right=1, k=2)
        0.5
    """
    return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer to a question; 0.0 if no attempt gives an answer."""
    given = [(normalize(answer), score) for answer, score in zip(answers, scores, strict=True) if answer is not None]
    votes = Counter(answer for answer, _ in given)
    return statistics.fmean([s for answer, s in given if votes[answer] == max(votes.values())]) if given else 0.0


def mean_logprob(trajectory: Trajectory) -> float:
    """Return the mean log-probability of an attempt's sampled tokens; -inf if there are none."""
    logprobs = [logprob for turn in trajectory.turns for logprob in turn.logprobs]
    return statistics.fmean(logprobs) if logprobs else -math.inf


def score_trajectory(trajectory: Trajectory) -> EvalResult:
    """Return exact match, F1 and sub-match of an attempt.

    - Exact match is the reward ``em`` or ``exact_match``, or else the first reward.
    - F1 is the reward ``f1``, or else exact match.
    - Sub-match is the reward ``sub_match``, or else None.

    If the attempt was not scored, the result has the reason (``failure``).
    """
    if not trajectory.rewards:
        return EvalResult(0.0, 0.0, failure=trajectory.reason or "it was not scored")
    totals = sum_rewards(trajectory)
    name = next((name for name in EXACT_MATCH_NAMES if name in totals), next(iter(totals)))
    measure = EXACT_MATCH if name in EXACT_MATCH_NAMES else f"reward {name!r}"
    value, f1 = totals[name], totals.get("f1")
    if value is None:
        return EvalResult(0.0, 0.0, measure=measure, failure=trajectory.reason or f"{name} could not be scored")
    return EvalResult(value, value if f1 is None else f1, totals.get("sub_match"), measure)


def mean_em(results: Sequence[EvalResult]) -> float:
    """Return the mean exact match of the attempts that could be scored; NaN if there are none."""
    return statistics.fmean([result.em for result in results if result.failure is None] or [math.nan])


def compute_rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of the attempts of one step, with retried attempts and without greedy attempts:

    - one metric per status, such as ``completed``: number of attempts with this status.
    - ``retried``: number of failed attempts that were retried.
    - ``unscored``: number of attempts that ended normally, but have a reward that is missing or not finite.
    - ``calls``: number of tool calls.
    - ``invalid_calls``: number of tool calls that failed because of an error of the agent.
    - ``failed_calls``: number of tool calls that failed because of an error of the tool.
    - ``turns``: mean number of turns of an attempt.
    - ``branches``: mean number of branches of an attempt; 1 if each turn continues the turn before.
    - ``attempt_tokens``: mean number of sampled tokens of an attempt.
    - ``continuations``, ``continuation_tokens``: number of continuations and of their sampled tokens, if there are any.
    """
    retried = [t for group in groups for t in group.retried if t.attempt.sample_index < len(group.trajectories)]
    trajectories = [*(t for group in groups for t in group.trajectories), *retried]
    statuses = Counter(trajectory.status for trajectory in trajectories)
    results = [result for trajectory in trajectories for turn in trajectory.turns for result in turn.results]
    invalid = sum(result.error in INVALID_CALL_KINDS for result in results)
    tokens = sum(len(turn.action_ids) for trajectory in trajectories for turn in trajectory.turns)
    counts = {
        **{status.value: statuses[status] for status in Status},
        "unscored": sum(map(_is_unscored, trajectories)),
        "retried": len(retried),
        "calls": len(results),
        "invalid_calls": invalid,
        "failed_calls": sum(not result.ok for result in results) - invalid,
        "turns": sum(len(trajectory.turns) for trajectory in trajectories) / max(len(trajectories), 1),
        "branches": sum(map(_num_branches, trajectories)) / max(len(trajectories), 1),
        "attempt_tokens": tokens / max(len(trajectories), 1),
    }
    if continuations := [one for group in groups for one in group.continuations]:
        counts["continuations"] = len(continuations)
        counts["continuation_tokens"] = sum(
            len(turn.action_ids) for one in continuations for turn in one.trajectory.turns[one.turn :]
        )
    return {name: float(count) for name, count in counts.items()}


def _num_branches(trajectory: Trajectory) -> int:
    return len(trajectory.turns) - len({turn.parent for turn in trajectory.turns} - {None})


def _is_unscored(trajectory: Trajectory) -> bool:
    values: list[float] = []
    for reward in trajectory.rewards.values():
        values += reward if isinstance(reward, tuple) else [math.nan if reward is None else reward]
    return STATUS_POLICY[trajectory.status] == "train" and not all(map(math.isfinite, values))
