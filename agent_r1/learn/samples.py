"""Which trajectories can be learned from, and what each of their turns earned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agent_r1.core.attempt import Attempt
from agent_r1.core.trajectory import TREATMENT, Group, RewardValue, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to learn from, with its weighted rewards.

    ``group`` numbers the groups of one update from 0, in the order they were dispatched.
    ``turn_rewards`` holds one number per turn, ``outcome`` the number for the whole.

    Example:
        Sample(trajectory, group=0, turn_rewards=(0.0, 0.1), outcome=1.0).total == 1.1
    """

    trajectory: Trajectory
    group: int
    turn_rewards: tuple[float, ...]
    outcome: float

    @property
    def total(self) -> float:
        """Everything the attempt earned."""
        return math.fsum((*self.turn_rewards, self.outcome))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An attempt that is not learned from, and why."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Admission:
    """What was handed in, divided: each attempt is in exactly one of the two."""

    samples: tuple[Sample, ...]
    left_out: tuple[LeftOut, ...]


Filter = Callable[[Sequence[Sample]], Sequence[str | None]]
"""For each sample None, or the reason why an algorithm does not learn from it."""


def admit(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> Admission:
    """Divide the attempts of ``groups`` into those to learn from and those not.

    A reward whose name is not in ``reward_weights`` weighs 1, one of weight 0 is ignored. The
    result does not depend on the order of the groups or of the trajectories within one.
    """
    samples: list[Sample] = []
    left_out: list[LeftOut] = []
    for number, group in enumerate(sorted(groups, key=lambda group: group.serial)):
        for trajectory in sorted(group.trajectories, key=lambda trajectory: trajectory.attempt.order):
            reason = next(_objections(trajectory, reward_weights), None)
            if reason is None:
                samples.append(_sample(trajectory, number, reward_weights))
            else:
                left_out.append(LeftOut(trajectory.attempt, reason))
    return Admission(tuple(samples), tuple(left_out))


def sift(admission: Admission, filters: Sequence[Filter]) -> Admission:
    """What remains after each filter has seen what the one before it left."""
    for judge in filters:
        reasons = judge(admission.samples)
        judged = list(zip(admission.samples, reasons, strict=True))
        dropped = [LeftOut(sample.trajectory.attempt, reason) for sample, reason in judged if reason is not None]
        kept = tuple(sample for sample, reason in judged if reason is None)
        admission = Admission(kept, (*admission.left_out, *dropped))
    return admission


def _counted(rewards: Mapping[str, T], weights: Mapping[str, float]) -> Iterator[tuple[str, float, T]]:
    """Name, weight and value of each reward that counts."""
    for name, value in rewards.items():
        if weight := weights.get(name, 1.0):
            yield name, weight, value


def _objections(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[str]:
    """Every reason why the trajectory cannot be learned from."""
    if TREATMENT[trajectory.status] == "drop":
        yield f"{trajectory.status}: {trajectory.reason}" if trajectory.reason else str(trajectory.status)
    if not any(turn.action_ids for turn in trajectory.turns):
        yield "no action tokens"
    for turn in trajectory.turns:
        if len(turn.logprobs) != len(turn.action_ids):
            yield f"turn {turn.index} has {len(turn.action_ids)} tokens, {len(turn.logprobs)} log-probabilities"
        if turn.action_ids and (not turn.spans or turn.spans[0].start > 0):
            yield f"turn {turn.index} does not say which weights sampled it"
        if turn.action_ids and not turn.new_ids and not trajectory.prompt_ids(turn):
            yield f"turn {turn.index} acts on an empty prompt"
        for name, _, value in _counted(turn.rewards, weights):
            if not math.isfinite(value):
                yield f"reward {name} of turn {turn.index} is {value}"
    for name, _, reward in _counted(trajectory.rewards, weights):
        yield from _reward_objections(name, reward, len(trajectory.turns))


def _reward_objections(name: str, reward: RewardValue, turns: int) -> Iterator[str]:
    if reward is None:
        yield f"reward {name} could not be scored"
    elif isinstance(reward, tuple) and len(reward) != turns:
        yield f"reward {name} has {len(reward)} numbers for {turns} turns"
    elif not all(map(math.isfinite, reward if isinstance(reward, tuple) else (reward,))):
        yield f"reward {name} is {reward}"


def _sample(trajectory: Trajectory, group: int, weights: Mapping[str, float]) -> Sample:
    per_turn = [[weight * value for _, weight, value in _counted(turn.rewards, weights)] for turn in trajectory.turns]
    outcome: list[float] = []
    for _, weight, reward in _counted(trajectory.rewards, weights):
        if isinstance(reward, tuple):
            for earned, value in zip(per_turn, reward, strict=True):
                earned.append(weight * value)
        elif reward is not None:
            outcome.append(weight * reward)
    return Sample(trajectory, group, tuple(map(math.fsum, per_turn)), math.fsum(outcome))
