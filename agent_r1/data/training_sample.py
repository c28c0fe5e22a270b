"""Training samples: the attempts that can be trained on, and the rewards of each turn of an attempt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent_r1.core.trajectory import (
    STATUS_POLICY,
    AttemptId,
    Group,
    Trajectory,
    Turn,
    can_be_summed,
    weighted_rewards,
    with_weights,
)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A trajectory that can be trained on, with its weighted rewards."""

    trajectory: Trajectory
    group: int  # index of the trajectory's group in the update, in the order of ``group_id``
    turn_rewards: tuple[float, ...]  # sum of the rewards of each turn, without those of calls
    outcome_reward: float  # sum of the rewards of the whole trajectory, without those of turns and calls
    call_rewards: tuple[tuple[float, ...], ...]  # for each turn, the sum of each call's rewards; () if there are none
    named_rewards: Mapping[str, float] = field(
        default_factory=dict
    )  # sum of all rewards of each name, wherever they are
    greedy_return: float | None = None  # of the group's greedy attempt (sampled with temperature 0), if there is one
    greedy_failure: str | None = None  # why the group's greedy attempt could not be scored
    role: str = ""  # of the group's attempts in a game of several agents

    @property
    def total(self) -> float:
        """The return of the trajectory: the weighted sum of all its rewards."""
        calls = (value for turn in self.call_rewards for value in turn)
        return math.fsum((*self.turn_rewards, *calls, self.outcome_reward))

    @property
    def version(self) -> int:
        """The version of the oldest weights that sampled a token of the trajectory."""
        return min(span.version for turn in self.trajectory.turns for span in turn.version_spans)


@dataclass(frozen=True, slots=True)
class Excluded:
    """An attempt that is not trained on, and the reason."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    samples: tuple[TrainingSample, ...]
    excluded: tuple[Excluded, ...]


def select_trainable(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> Selection:
    """Return the training samples of ``groups``, and the excluded attempts with their reasons.

    Greedy attempts are in neither list: they only set ``greedy_return`` or ``greedy_failure`` of the samples in their
    groups. A weight that is missing in ``reward_weights`` is 1. A reward with weight 0 is ignored.
    """
    samples: list[TrainingSample] = []
    excluded: list[Excluded] = []
    # sorted, so that sums and batches do not depend on the order in which episodes ended
    for number, group in enumerate(sorted(groups, key=lambda group: group.group_id)):
        greedy_return = greedy_failure = None
        if group.greedy is not None:
            greedy_failure = next(_defects(group.greedy, reward_weights), None)
            if greedy_failure is None:
                greedy_return = _sample(group.greedy, 0, reward_weights).total
        for trajectory in sorted(group.trajectories, key=lambda trajectory: trajectory.attempt.sort_key):
            reason = next(_defects(trajectory, reward_weights), None)
            if reason is None:
                sample = _sample(trajectory, number, reward_weights)
                sample = replace(sample, greedy_return=greedy_return, greedy_failure=greedy_failure, role=group.role)
                samples.append(sample)
            else:
                excluded.append(Excluded(trajectory.attempt, reason))
    return Selection(tuple(samples), tuple(excluded))


def describe_status(trajectory: Trajectory) -> str:
    """Return the status of an episode with its reason, such as "engine_failed: the engine was closed"."""
    return f"{trajectory.status}: {trajectory.reason}" if trajectory.reason else str(trajectory.status)


def _defects(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[str]:
    # Yield every reason why the trajectory cannot be trained on, such as "no action tokens".
    if STATUS_POLICY[trajectory.status] != "train":
        yield describe_status(trajectory)
    if not any(turn.action_ids for turn in trajectory.turns):
        yield "no action tokens"
    for turn in trajectory.turns:
        yield from _turn_defects(turn, weights)
        if turn.action_ids and not turn.new_ids and not trajectory.prompt_ids(turn):
            yield f"turn {turn.index} has an empty prompt"
    for name, _, reward in with_weights(trajectory.rewards, weights):
        if reward is None:
            yield trajectory.reason or f"reward {name} could not be scored"
        elif isinstance(reward, tuple) and trajectory.turns_for_rewards(len(reward)) is None:
            yield f"reward {name} has {len(reward)} numbers for {len(trajectory.turns)} turns"
        elif not all(map(can_be_summed, reward if isinstance(reward, tuple) else (reward,))):
            yield f"reward {name} is {reward}"


def _turn_defects(turn: Turn, weights: Mapping[str, float]) -> Iterator[str]:
    if len(turn.logprobs) != len(turn.action_ids):
        yield f"turn {turn.index} has {len(turn.action_ids)} tokens, {len(turn.logprobs)} log-probabilities"
    if turn.action_ids and (not turn.version_spans or turn.version_spans[0].start > 0):
        yield f"turn {turn.index} has no version of the weights that sampled it"
    for name, _, value in with_weights(turn.rewards, weights):
        if not can_be_summed(value):
            yield f"reward {name} of turn {turn.index} is {value}"
    if turn.call_rewards and len(turn.call_rewards) != len(turn.call_ends):
        yield f"turn {turn.index} has rewards for {len(turn.call_rewards)} calls and made {len(turn.call_ends)}"
    if not all(0 <= end < len(turn.action_ids) for end in turn.call_ends):
        yield f"turn {turn.index} has a call that ends outside its {len(turn.action_ids)} tokens"
    for call, rewards in enumerate(turn.call_rewards):
        for name, _, value in with_weights(rewards, weights):
            if not can_be_summed(value):
                yield f"reward {name} of call {call} in turn {turn.index} is {value}"


def _sample(trajectory: Trajectory, group: int, weights: Mapping[str, float]) -> TrainingSample:
    # Return the training sample of ``trajectory``, which must have no defects (:func:`_defects`).
    # values by (turn, call): (None, None) for the whole trajectory, (turn, None) for a whole turn
    by_place: dict[tuple[int | None, int | None], list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for reward in weighted_rewards(trajectory, weights):
        by_place.setdefault((reward.turn, reward.call), []).append(reward.value)
        by_name.setdefault(reward.name, []).append(reward.value)
    # fsum: the order of the rewards does not change a sum
    sums = {place: math.fsum(values) for place, values in by_place.items()}
    return TrainingSample(
        trajectory=trajectory,
        group=group,
        turn_rewards=tuple(sums.get((number, None), 0.0) for number in range(len(trajectory.turns))),
        outcome_reward=sums.get((None, None), 0.0),
        call_rewards=tuple(
            tuple(sums.get((number, call), 0.0) for call in range(len(turn.call_rewards)))
            for number, turn in enumerate(trajectory.turns)
        ),
        named_rewards={name: math.fsum(values) for name, values in by_name.items()},
    )
