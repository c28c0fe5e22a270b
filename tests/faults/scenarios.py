"""The runs that are killed: a few small steps each, with different state to restore."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Scores, Trajectory
from agent_r1.tasksets import build

MICRO: Mapping[str, Any] = {
    "model": str(Path(__file__).parents[1] / "golden" / "base"),
    "steps": 4,
    "groups_per_step": 2,
    "group_size": 4,
    "max_tokens": 20,
    "evaluate_every": 0,
    "evaluate_n": 1,
    "pass_k": 0,
    "checkpoint_every": 1,
    "reward_weights.found": 1.0,
    "engine.max_sequences": 8,
    "trainer.critic_epochs": 1,
    "trainer.critic_minibatches": 2,
}
"""The model of the golden record learns in a few steps. Searches that find a page are rewarded, so that every step has
a signal. Decode batches are small and the critic's passes few, to be cheap."""


def micro_taskset() -> TaskSet:
    """Return TinyWiki with a final table of one cell."""
    return replace(build("tinywiki", None, None, 0), baselines={}, evaluation=("style-a",))


BEST_VERSION = 3
"""The version of the policy with the best validation in the runs of ``unpredictable_taskset``."""


class MiddleIsBestScorer:
    """Exact match without meaning: pseudo-random numbers in training, so that groups have a signal.

    In validation the number falls with the distance from ``BEST_VERSION``, so that the best step is in the middle,
    whatever the processor's rounding errors sample.
    """

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return tuple({"em": self._em(one, task)} for one in group)

    def _em(self, one: Trajectory, task: Task) -> float:
        if task.split == "train":
            return random.Random(one.last_text + task.id).random()
        return 1 - abs(one.turns[0].version_spans[0].version - BEST_VERSION) / 10


def unpredictable_taskset() -> TaskSet:
    """Return the same with rewards that no policy can predict, and the best validation in the middle of a run."""
    return replace(micro_taskset(), scorers=(MiddleIsBestScorer(),))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A named run: its differences from ``MICRO``, and its task set."""

    name: str
    settings: Mapping[str, Any]
    taskset: Callable[[], TaskSet] = micro_taskset

    def but(self, **settings: Any) -> Scenario:
        """Return the same run with other settings."""
        return replace(self, settings={**self.settings, **settings})


GRPO = Scenario("grpo", {"algorithm": "grpo"})
PPO = Scenario("ppo", {"algorithm": "ppo"})
REFILL = Scenario(
    "grpo with refill",
    {
        "algorithm": {"name": "grpo", "max_refill_rounds": 2, "constant_groups": "drop"},
        "reward_weights.found": 0.0,
    },
)
SPARSE = Scenario("grpo, checkpoint_every 3", {"algorithm": "grpo", "steps": 5, "checkpoint_every": 3})
"""A kill is up to three steps after the last checkpoint."""

EVERYTHING = Scenario(
    "everything",
    {
        "algorithm": {"name": "ppo", "kl.coefficient": 0.05, "kl.target": 0.01},
        "trainer": {"minibatches": 2, "learning_rate": 3e-2},
        "evaluate_every": 1,
        "evaluate_n": 8,
    },
    unpredictable_taskset,
)
"""A critic, an adaptive KL to a reference, several minibatches, and a best step that is not the last."""

_PAIRS: Mapping[str, Any] = {"groups_per_step": 4, "group_size": 2}
"""Pairs often have equal rewards, and then no signal."""

STALE: Sequence[Scenario] = (
    REFILL.but(max_staleness=1, steps=4, checkpoint_every=2, **{**_PAIRS, "reward_weights.found": 1.0}),
    Scenario("dapo", {"algorithm": "dapo", "max_staleness": 2, "steps": 5, "checkpoint_every": 3, **_PAIRS}),
)
"""Groups are sampled up to one or two steps ahead; groups without a signal are replaced."""
