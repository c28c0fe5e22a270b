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


class PseudoRandomScorer:
    """Exact match as a pseudo-random number, so that the best step is somewhere in the middle."""

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        return tuple({"em": random.Random(t.last_text + task.id).random()} for t in group)


def unpredictable_taskset() -> TaskSet:
    """Return the same with unpredictable validation results."""
    return replace(micro_taskset(), scorers=(PseudoRandomScorer(),))


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
