"""Shuffled rewards keep their sum, and are independent of the attempts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import pytest

from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Scores, Status, Trajectory, Unscored
from agent_r1.rewards.scoring import ShuffledScorer


def group_of(task: str, size: int) -> list[Trajectory]:
    return [Trajectory(AttemptId("run", task, 0, member), task, (), Status.COMPLETED) for member in range(size)]


class FirstAttemptScorer:
    """Rewards the first attempt of a group only, in two rewards, and cannot compute a third one for it."""

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        first = {"score": 1.0, "turns": (0.5, 0.25), "broken": Unscored("no network")}
        return (first, *({"score": 0.0, "turns": (0.0,), "broken": 0.0} for _ in group[1:]))


def test_every_attempt_gets_the_reward_of_the_first_equally_often() -> None:
    scored = [
        asyncio.run(ShuffledScorer(FirstAttemptScorer()).score(group_of(str(n), 4), Task(str(n), ())))
        for n in range(400)
    ]
    assert all(sum(scores["score"] == 1.0 for scores in group) == 1 for group in scored)
    for member in range(4):
        assert statistics.fmean(group[member]["score"] == 1.0 for group in scored) == pytest.approx(0.25, abs=0.08)


def test_the_rewards_of_an_attempt_move_together_and_turn_rewards_are_summed() -> None:
    scored = asyncio.run(ShuffledScorer(FirstAttemptScorer()).score(group_of("t", 4), Task("t", ())))
    first = next(scores for scores in scored if scores["score"] == 1.0)
    assert first == {"score": 1.0, "turns": 0.75, "broken": Unscored("no network")}
    assert [scores["turns"] for scores in scored if scores is not first] == [0.0, 0.0, 0.0]


def test_a_repetition_shuffles_in_the_same_way() -> None:
    once, again = (
        asyncio.run(ShuffledScorer(FirstAttemptScorer()).score(group_of("t", 16), Task("t", ()))) for _ in range(2)
    )
    assert once == again
