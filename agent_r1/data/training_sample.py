"""Which trajectories can be learned from, and what each of their turns earned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.trajectory import STATUS_POLICY, Group, Trajectory, Turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A trajectory to learn from, with its weighted rewards.

    ``group`` numbers the groups of one update from 0, in the order they were dispatched.
    ``turn_rewards`` holds one number per turn, ``outcome`` the number for the whole, ``call_rewards`` one
    number per rewarded call of each turn. ``named`` sums all of these by the rewards' names. ``greedy`` is what the
    group's greedy attempt earned, None where there was none that could be scored; then ``no_greedy`` says why.

    Example:
        TrainingSample(trajectory, group=0, turn_rewards=(0.0, 0.1), outcome=1.0, call_rewards=((), ())).total == 1.1
    """

    trajectory: Trajectory
    group: int
    turn_rewards: tuple[float, ...]
    outcome: float
    call_rewards: tuple[tuple[float, ...], ...]
    named: Mapping[str, float] = field(default_factory=dict)
    greedy: float | None = None
    no_greedy: str | None = None

    @property
    def total(self) -> float:
        """Everything the attempt earned."""
        calls = (value for turn in self.call_rewards for value in turn)
        return math.fsum((*self.turn_rewards, *calls, self.outcome))

    @property
    def version(self) -> int:
        """The oldest weights that any of its tokens was sampled from."""
        return min(span.version for turn in self.trajectory.turns for span in turn.version_spans)


@dataclass(frozen=True, slots=True)
class Excluded:
    """An attempt that is not learned from, and why."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What was handed in, divided: each attempt is in exactly one of the two."""

    samples: tuple[TrainingSample, ...]
    left_out: tuple[Excluded, ...]


def select_trainable(groups: Sequence[Group], reward_weights: Mapping[str, float]) -> Selection:
    """Divide the attempts of ``groups`` into those to learn from and those not; greedy attempts are in neither.

    A reward whose name is not in ``reward_weights`` weighs 1, one of weight 0 is ignored. The
    result does not depend on the order of the groups or of the trajectories within one.
    """
    samples: list[TrainingSample] = []
    left_out: list[Excluded] = []
    for number, group in enumerate(sorted(groups, key=lambda group: group.group_id)):
        missing = None if group.greedy is None else next(_objections(group.greedy, reward_weights), None)
        greedy = None if group.greedy is None or missing else _sample(group.greedy, 0, reward_weights).total
        for trajectory in sorted(group.trajectories, key=lambda trajectory: trajectory.attempt.sort_key):
            reason = next(_objections(trajectory, reward_weights), None)
            if reason is None:
                sample = _sample(trajectory, number, reward_weights)
                samples.append(replace(sample, greedy=greedy, no_greedy=missing))
            else:
                left_out.append(Excluded(trajectory.attempt, reason))
    return Selection(tuple(samples), tuple(left_out))


def describe_status(trajectory: Trajectory) -> str:
    """How it ended, with the reason where there is one: ``engine_failed: the engine was closed``."""
    return f"{trajectory.status}: {trajectory.reason}" if trajectory.reason else str(trajectory.status)


def _counted(rewards: Mapping[str, T], weights: Mapping[str, float]) -> Iterator[tuple[str, float, T]]:
    """Name, weight and value of each reward that counts."""
    for name, value in rewards.items():
        if weight := weights.get(name, 1.0):
            yield name, weight, value


def _objections(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[str]:
    """Every reason why the trajectory cannot be learned from."""
    if STATUS_POLICY[trajectory.status] != "train":
        yield describe_status(trajectory)
    if not any(turn.action_ids for turn in trajectory.turns):
        yield "no action tokens"
    for turn in trajectory.turns:
        yield from _turn_objections(turn, weights)
        if turn.action_ids and not turn.new_ids and not trajectory.prompt_ids(turn):
            yield f"turn {turn.index} acts on an empty prompt"
    for name, _, reward in _counted(trajectory.rewards, weights):
        if reward is None:
            yield trajectory.reason or f"reward {name} could not be scored"
        else:
            yield from _reward_objections(name, reward, trajectory)


def _turn_objections(turn: Turn, weights: Mapping[str, float]) -> Iterator[str]:
    if len(turn.logprobs) != len(turn.action_ids):
        yield f"turn {turn.index} has {len(turn.action_ids)} tokens, {len(turn.logprobs)} log-probabilities"
    if turn.action_ids and (not turn.version_spans or turn.version_spans[0].start > 0):
        yield f"turn {turn.index} does not say which weights sampled it"
    for name, _, value in _counted(turn.rewards, weights):
        if not math.isfinite(value):
            yield f"reward {name} of turn {turn.index} is {value}"
    yield from _call_objections(turn, weights)


def _call_objections(turn: Turn, weights: Mapping[str, float]) -> Iterator[str]:
    if turn.call_rewards and len(turn.call_rewards) != len(turn.call_ends):
        yield f"turn {turn.index} has rewards for {len(turn.call_rewards)} calls and made {len(turn.call_ends)}"
    if not all(0 <= end < len(turn.action_ids) for end in turn.call_ends):
        yield f"turn {turn.index} has a call that ends outside its {len(turn.action_ids)} tokens"
    for call, rewards in enumerate(turn.call_rewards):
        for name, _, value in _counted(rewards, weights):
            if not math.isfinite(value):
                yield f"reward {name} of call {call} in turn {turn.index} is {value}"


def _reward_objections(name: str, reward: float | tuple[float, ...], trajectory: Trajectory) -> Iterator[str]:
    if isinstance(reward, tuple) and trajectory.turns_for_rewards(len(reward)) is None:
        yield f"reward {name} has {len(reward)} numbers for {len(trajectory.turns)} turns"
    elif not all(map(math.isfinite, reward if isinstance(reward, tuple) else (reward,))):
        yield f"reward {name} is {reward}"


@dataclass(frozen=True, slots=True)
class _Earning:
    """One weighted reward: of the whole attempt, of a turn, or of a call of a turn."""

    name: str
    value: float
    turn: int | None = None
    call: int | None = None


def _earnings(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[_Earning]:
    for number, turn in enumerate(trajectory.turns):
        for name, weight, value in _counted(turn.rewards, weights):
            yield _Earning(name, weight * value, number)
        for call, rewards in enumerate(turn.call_rewards):
            for name, weight, value in _counted(rewards, weights):
                yield _Earning(name, weight * value, number, call)
    for name, weight, reward in _counted(trajectory.rewards, weights):
        if isinstance(reward, tuple):
            turns = trajectory.turns_for_rewards(len(reward)) or ()
            yield from (_Earning(name, weight * value, turn.index) for turn, value in zip(turns, reward, strict=True))
        elif reward is not None:
            yield _Earning(name, weight * reward)


def _sample(trajectory: Trajectory, group: int, weights: Mapping[str, float]) -> TrainingSample:
    places: dict[tuple[int | None, int | None], list[float]] = {}
    named: dict[str, list[float]] = {}
    for earning in _earnings(trajectory, weights):
        places.setdefault((earning.turn, earning.call), []).append(earning.value)
        named.setdefault(earning.name, []).append(earning.value)
    earned = {place: math.fsum(values) for place, values in places.items()}
    return TrainingSample(
        trajectory=trajectory,
        group=group,
        turn_rewards=tuple(earned.get((number, None), 0.0) for number in range(len(trajectory.turns))),
        outcome=earned.get((None, None), 0.0),
        call_rewards=tuple(
            tuple(earned.get((number, call), 0.0) for call in range(len(turn.call_rewards)))
            for number, turn in enumerate(trajectory.turns)
        ),
        named={name: math.fsum(values) for name, values in named.items()},
    )
