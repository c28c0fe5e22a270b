"""Evaluation metrics: exact match, F1 and sub-match of an attempt; pass@k and the majority vote of a question."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.trajectory import Rewards, Trajectory
from agent_r1.rewards.answers import normalize

EXACT_MATCH = "exact match"

EXACT_MATCH_NAMES = ("em", "exact_match")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The evaluation of one attempt.

    Attributes:
        em: exact match, or the first reward if the task set reports no exact match.
        f1: F1; equal to ``em`` if the task set reports no F1.
        sub: 1 if a right answer occurs in the given answer, else 0; None if not reported.
        measure: the name of the number ``em``: "exact match", or a reward such as "reward 'solved'".
        failure: why the attempt failed or could not be scored; None if scored. Failed attempts count as wrong.
    """

    em: float
    f1: float
    sub: float | None = None
    measure: str = EXACT_MATCH
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
    """Return the score of the most frequent answer to a question; 0.0 if no attempt gives an answer.

    Answers are compared after normalization. If several answers are the most frequent, return their mean score.
    ``scores`` has the exact match of each attempt.

    Example:
        >>> majority_score(["Rome", "Oslo", "rome.", None], [1.0, 0.0, 1.0, 0.0])
        1.0
    """
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

    Exact match and F1 are 0 if the attempt was not scored.
    """
    rewards = trajectory.rewards
    if not rewards:
        return EvalResult(0.0, 0.0, failure=trajectory.reason or "it was not scored")
    name = next((name for name in EXACT_MATCH_NAMES if name in rewards), next(iter(rewards)))
    measure = EXACT_MATCH if name in EXACT_MATCH_NAMES else f"reward {name!r}"
    value = _total(rewards, name)
    if value is None:
        return EvalResult(0.0, 0.0, measure=measure, failure=trajectory.reason or f"{name} could not be scored")
    f1 = _total(rewards, "f1")
    return EvalResult(value, value if f1 is None else f1, _total(rewards, "sub_match"), measure)


def _total(rewards: Rewards, name: str) -> float | None:
    value = rewards.get(name)
    return sum(value) if isinstance(value, tuple) else value
