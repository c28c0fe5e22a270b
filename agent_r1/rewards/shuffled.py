"""A scorer for control runs: its rewards carry no information about the attempts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.task import Task
from agent_r1.core.trajectory import RewardValue, Scorer, Scores, Trajectory, Unscored


@dataclass(frozen=True, slots=True)
class ShuffledScorer:
    """A scorer that shuffles the rewards of ``scorer`` among the attempts at a task.

    A policy can learn nothing from shuffled rewards. The mean and the spread of the rewards in a group stay the same. A
    reward with one number per turn first becomes the sum of its numbers.

    If attempt A gets one reward of attempt B, attempt A gets all rewards of attempt B. This includes the rewards from
    other shuffled scorers.

    Example:
        ShuffledScorer(FunctionScorer({"em": exact_match}))
    """

    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        scores = await self.scorer.score(group, task)
        order = list(range(len(scores)))
        if group:
            random.Random(f"{group[0].attempt.sort_key} {task.id}").shuffle(order)
        return tuple({name: _total(value) for name, value in scores[index].items()} for index in order)


def _total(value: RewardValue | Unscored) -> RewardValue | Unscored:
    return sum(value) if isinstance(value, tuple) else value
