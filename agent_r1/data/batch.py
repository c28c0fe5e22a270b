"""Training samples, and the training batch: the tokens of one update as flat tensors.

Each token has the indices of its turn, trajectory and group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from agent_r1.core.inference import NO_POLICY
from agent_r1.core.messages import Message
from agent_r1.core.trajectory import (
    STATUS_POLICY,
    AttemptId,
    Group,
    Trajectory,
    Turn,
    can_be_summed,
    total_reward,
    weighted_rewards,
    with_weights,
)
from agent_r1.data.sequences import Packing, TokenSequence, TurnPlace


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
    # for each turn that continuations valued, the mean of their returns
    turn_values: Mapping[int, float] = field(default_factory=dict)

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
    """Return the training samples of ``groups``, and the excluded attempts. Greedy attempts are in neither list."""
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
                samples.append(replace(sample, turn_values=_turn_values(group, trajectory.attempt, reward_weights)))
            else:
                excluded.append(Excluded(trajectory.attempt, reason))
    return Selection(tuple(samples), tuple(excluded))


def _turn_values(group: Group, attempt: AttemptId, weights: Mapping[str, float]) -> dict[int, float]:
    returns: dict[int, list[float]] = {}
    for one in group.continuations:
        if one.attempt == attempt and (total := total_reward(one.trajectory, weights)) is not None:
            returns.setdefault(one.turn, []).append(total)
    return {turn: math.fsum(some) / len(some) for turn, some in returns.items()}


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


# Reductions over units: turns, trajectories or groups. ``unit`` (N,) holds the index of each element's unit.


def segment_count(unit: Tensor) -> Tensor:
    """Return the number of elements of each unit: (units,)."""
    return torch.bincount(unit)


def segment_sum(x: Tensor, unit: Tensor) -> Tensor:
    """Return the sum of the elements of ``x`` (N,) in each unit: (units,)."""
    return x.new_zeros(len(segment_count(unit))).index_add(0, unit, x)


def segment_mean(x: Tensor, unit: Tensor) -> Tensor:
    """Return the mean of the elements of ``x`` (N,) in each unit: (units,)."""
    return segment_sum(x, unit) / segment_count(unit).clamp(min=1)


def segment_max(x: Tensor, unit: Tensor) -> Tensor:
    """Return the maximum of the elements of ``x`` (N,) in each unit: (units,)."""
    return x.new_zeros(len(segment_count(unit))).scatter_reduce(0, unit, x, "amax")


def segment_last(unit: Tensor) -> Tensor:
    """Return the index of the last element of each unit: (units,). Units must be contiguous and not empty."""
    return segment_count(unit).cumsum(0) - 1  # (units,) counts of the units 0 .. u, minus 1


def segment_first(unit: Tensor) -> Tensor:
    """Return the index of the first element of each unit: (units,). Units must be contiguous and not empty."""
    return segment_last(unit) - segment_count(unit) + 1


def index_within(unit: Tensor) -> Tensor:
    """Return the index of each element within its unit: (N,). Units must be contiguous and not empty."""
    return torch.arange(len(unit)) - segment_first(unit)[unit]


def previous_within(unit: Tensor) -> Tensor:
    """Return the index of the previous element of the same unit, or -1: (N,). Units must be contiguous."""
    positions = torch.arange(len(unit))  # (N,)
    return torch.where(positions == segment_first(unit)[unit], -1, positions - 1)


def unique_ids(*keys: Tensor) -> Tensor:
    """Return an id, counted from 0, for each index of the tensors ``keys``: (N,)."""
    return torch.unique(torch.stack(keys), dim=1, return_inverse=True)[1]


TokenScope = Literal["actions", "all"]
"""The tokens that a batch holds. actions: action tokens only. all: also the observations between two actions."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedReward:
    """All rewards in a batch that have the same name, such as "format"."""

    name: str
    weight: float
    returns: Tensor  # (M,) float64: weight * sum of the rewards of this name in each trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """N tokens of S turns of M trajectories, ordered by trajectory, turn index and position. Tensors are on the CPU.

    Usually the N tokens are action tokens only. If an algorithm trains on observations, these are included. Turns
    without action tokens are left out. ``sequences`` holds all tokens that the model reads, with prompts.
    """

    ids: Tensor  # (N,) int64
    sampler_logprobs: Tensor  # (N,) float64 in the sampler, at the sampling temperature; NaN for observations
    # (N,) int64 version of the weights that sampled the token, or the action before an observation; perhaps NO_POLICY
    versions: Tensor
    action_mask: Tensor  # (N,) whether the policy sampled the token
    # (N,) float64 weighted rewards: of a call on the token that ends it, of a turn on its last action token, and the
    # outcome reward on the last action token of the trajectory. Observations have none.
    token_rewards: Tensor
    token_turn: Tensor  # (N,) int64 index of the turn; an observation belongs to the turn of the action before it
    turn_trajectory: Tensor  # (S,) int64 index of each turn's trajectory
    # (S,) int64 index of the state before each turn: the last observation, or the opening messages. Turns of a group
    # have the same index if their states have equal roles, texts and images.
    turn_state_ids: Tensor
    # (S,) float64 mean return of the continuations of the attempt from each turn; NaN without continuations
    turn_values: Tensor
    turn_used_tool: Tensor  # (S,) whether the turn has tool results
    turn_is_summary: Tensor  # (S,) whether the turn summarizes the context, and does not act in the environment
    trajectory_group: Tensor  # (M,) int64 index of each trajectory's group
    outcome_rewards: Tensor  # (M,) float64 weighted outcome reward, which ``token_rewards`` includes
    greedy_return: Tensor  # (M,) float64 return of the greedy attempt (temperature 0) of the group; NaN without one
    role_baseline: Tensor  # (M,) float64 running mean of the role's earlier returns; 0 without ``AgainstRole``
    truncated: Tensor  # (M,) whether the episode was cut off, for example because turns or tokens ran out
    # Why the loss excludes a trajectory, or None. An excluded trajectory still counts in baselines.
    loss_excluded: tuple[str | None, ...]
    named_rewards: tuple[NamedReward, ...]
    attempts: tuple[AttemptId, ...]
    sequences: tuple[TokenSequence, ...]

    @property
    def sampled(self) -> Tensor:
        """(N,) whether weights sampled the token; false for observations, and for examples that a script wrote."""
        return self.action_mask & (self.versions != NO_POLICY)

    def staleness(self, version: int) -> int:
        """Return how many versions before ``version`` the oldest sampled token is; 0 if no token was sampled."""
        versions = self.versions[self.sampled]
        return version - int(versions.min()) if len(versions) else 0

    @property
    def token_trajectory(self) -> Tensor:
        """(N,) index of each token's trajectory."""
        return self.turn_trajectory[self.token_turn]  # token -> turn -> trajectory

    @property
    def token_group(self) -> Tensor:
        """(N,) index of each token's group."""
        return self.trajectory_group[self.token_trajectory]

    @property
    def turn_group(self) -> Tensor:
        """(S,) index of each turn's group."""
        return self.trajectory_group[self.turn_trajectory]

    @property
    def previous_turn(self) -> Tensor:
        """(S,) index of the turn before each turn of a trajectory; -1 for its first turn."""
        return previous_within(self.turn_trajectory)

    @property
    def turn_rewards(self) -> Tensor:
        """(S,) for each turn, the sum of its rewards. The last turn of a trajectory includes the outcome reward."""
        return segment_sum(self.token_rewards, self.token_turn)

    @property
    def process_rewards(self) -> Tensor:
        """(S,) for each turn, the sum of its rewards, without the outcome reward."""
        # the outcome reward is on the last action token of the trajectory, and so in the last turn
        outcome = torch.zeros_like(self.turn_rewards).index_put((self.last_turns,), self.outcome_rewards)
        return self.turn_rewards - outcome

    @property
    def returns(self) -> Tensor:
        """(M,) return of each trajectory: the sum of all its rewards."""
        return segment_sum(self.token_rewards, self.token_trajectory)

    @property
    def first_tokens(self) -> Tensor:
        """(S,) index of each turn's first action token."""
        return segment_first(self.token_turn)

    @property
    def last_tokens(self) -> Tensor:
        """(M,) index of each trajectory's last action token."""
        positions = torch.where(self.action_mask, torch.arange(len(self.ids)), -1)  # (N,)
        # observation tokens have position -1 here, so the maximum is the position of an action token
        initial = torch.full((len(self.outcome_rewards),), -1)
        return initial.scatter_reduce(0, self.token_trajectory, positions, "amax")

    @property
    def last_turns(self) -> Tensor:
        """(M,) index of each trajectory's last turn."""
        return segment_last(self.turn_trajectory)

    def join_summaries(self) -> tuple[TrainingBatch, Tensor]:
        """Return a batch with D joined turns, and the index of the last original turn in each joined turn: (D,).

        Each summary turn is joined with the next acting turn of its trajectory, or with the last one if none follows:
        the turns act, summary, act, act, summary become (act), (summary, act), (act, summary), with the last original
        turns 0, 2 and 4.
        """
        count = len(self.turn_trajectory)
        if not bool(self.turn_is_summary.any()):
            return self, torch.arange(count)
        turns = torch.arange(count)  # (S,)
        # the last turn of each trajectory that is not a summary; -1 if all turns are summaries: (M,)
        acted = segment_max(torch.where(self.turn_is_summary, 0, turns + 1), self.turn_trajectory) - 1
        previous = self.previous_turn  # (S,)
        after_action = ~self.turn_is_summary[previous.clamp(min=0)] & (turns <= acted[self.turn_trajectory])  # (S,)
        begins = (previous < 0) | after_action  # (S,) whether a turn begins a new time step
        joined, first = begins.cumsum(0) - 1, begins.nonzero().squeeze(1)  # (S,), (D,)
        batch = replace(
            self,
            token_turn=joined[self.token_turn],
            turn_trajectory=self.turn_trajectory[first],
            turn_state_ids=self.turn_state_ids[first],  # a summary does not change the state
            turn_values=self.turn_values[first],
            turn_used_tool=segment_sum(self.turn_used_tool.double(), joined) > 0,
            turn_is_summary=torch.zeros_like(first, dtype=torch.bool),
        )
        return batch, segment_last(joined)

    def actions(self) -> TrainingBatch:
        """Return a batch with only the action tokens."""
        if bool(self.action_mask.all()):
            return self  # the usual case: the batch has no observations
        return self.tokens(self.action_mask)

    def tokens(self, mask: Tensor) -> TrainingBatch:
        """Return a batch with only the tokens that ``mask`` (N,) selects, and without ``sequences``."""
        positions = mask.nonzero().squeeze(1)  # (n,)
        return replace(
            self,
            ids=self.ids[positions],
            sampler_logprobs=self.sampler_logprobs[positions],
            versions=self.versions[positions],
            action_mask=self.action_mask[positions],
            token_rewards=self.token_rewards[positions],
            token_turn=self.token_turn[positions],
            sequences=(),
        )


@dataclass(slots=True)
class _TokenColumns:
    """Lists with one entry per token of a batch."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add(
        self, turn: int, ids: Sequence[int], logprobs: Iterable[float], versions: Iterable[int], is_action: bool
    ) -> int:
        position = len(self.ids)
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions
        self.action_mask += [is_action] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.turns += [turn] * len(ids)
        return position


def assemble_batch(
    samples: Sequence[TrainingSample],
    packing: Packing,
    scope: TokenScope = "actions",
    reward_weights: Mapping[str, float] | None = None,
    loss_excluded: Sequence[str | None] | None = None,
) -> TrainingBatch:
    """Return the training batch of one or more samples. Without an entry in ``reward_weights``, a weight is 1."""
    # the columns of tokens, and the place of each turn in the columns
    tokens = _TokenColumns()
    places: list[list[TurnPlace]] = []
    turns = 0
    for sample in samples:
        places.append(_add_tokens(sample, tokens, turns, scope))
        turns += sum(bool(turn.action_ids) for turn in sample.trajectory.turns)
    # turns without action tokens are not in the batch
    acting = [[turn for turn in sample.trajectory.turns if turn.action_ids] for sample in samples]
    # a missing greedy return is NaN: an advantage that is computed from NaN is refused later
    greedy = [math.nan if sample.greedy_return is None else sample.greedy_return for sample in samples]
    weights = reward_weights or {}
    named = {  # a trajectory without a reward of a name has the return 0 for this name: (M,)
        name: torch.tensor([sample.named_rewards.get(name, 0.0) for sample in samples], dtype=torch.float64)
        for name in sorted({name for sample in samples for name in sample.named_rewards})
    }
    return TrainingBatch(
        ids=torch.tensor(tokens.ids),  # (N,)
        sampler_logprobs=torch.tensor(tokens.logprobs, dtype=torch.float64),
        versions=torch.tensor(tokens.versions),
        action_mask=torch.tensor(tokens.action_mask),
        token_rewards=torch.tensor(tokens.rewards, dtype=torch.float64),
        token_turn=torch.tensor(tokens.turns),  # (N,)
        turn_trajectory=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([*map(len, acting)])),  # (S,)
        turn_state_ids=_state_ids(samples),  # (S,)
        turn_values=torch.tensor([*chain.from_iterable(map(_values_of_acting_turns, samples))], dtype=torch.float64),
        turn_used_tool=torch.tensor([bool(turn.results) for turn in chain.from_iterable(acting)]),
        turn_is_summary=torch.tensor([turn.kind == "summary" for turn in chain.from_iterable(acting)]),
        trajectory_group=torch.tensor([sample.group for sample in samples]),  # (M,)
        outcome_rewards=torch.tensor([sample.outcome_reward for sample in samples], dtype=torch.float64),
        greedy_return=torch.tensor(greedy, dtype=torch.float64),
        role_baseline=torch.zeros(len(samples), dtype=torch.float64),
        truncated=torch.tensor([sample.trajectory.truncated for sample in samples]),
        loss_excluded=(None,) * len(samples) if loss_excluded is None else tuple(loss_excluded),
        named_rewards=tuple(NamedReward(name, weights.get(name, 1.0), returns) for name, returns in named.items()),
        attempts=tuple(sample.trajectory.attempt for sample in samples),
        sequences=tuple(
            sequence
            for number, (sample, turn_places) in enumerate(zip(samples, places, strict=True))
            for sequence in packing(sample.trajectory, number, turn_places)
        ),
    )


def _add_tokens(sample: TrainingSample, tokens: _TokenColumns, first: int, scope: TokenScope) -> list[TurnPlace]:
    places: list[TurnPlace] = []
    rewards = _rewards_of_acting_turns(sample)
    number, observation = first - 1, None
    for turn in sample.trajectory.turns:
        if not turn.action_ids:
            places.append(TurnPlace(number, len(tokens.ids)))
            continue
        number += 1
        # the version of the weights that sampled each token; a span ends at the start of the next span
        ends = [*(span.start for span in turn.version_spans[1:]), len(turn.action_ids)]
        spans = zip(turn.version_spans, ends, strict=True)
        versions = [span.version for span, end in spans for _ in range(span.start, end)]
        position = tokens.add(number, turn.action_ids, turn.logprobs, versions, is_action=True)
        places.append(TurnPlace(number, position, observation))
        # the reward of a call is on the token that ends the call, the reward of the turn on its last action token
        for end, reward in zip(turn.call_ends, sample.call_rewards[turn.index], strict=False):
            tokens.rewards[position + end] += reward
        tokens.rewards[position + len(turn.action_ids) - 1] += rewards[turn.index]
        observation = _add_observation(sample.trajectory, turn, number, tokens) if scope == "all" else None
    return places


def _rewards_of_acting_turns(sample: TrainingSample) -> dict[int, float]:
    # the reward of a turn without action tokens goes to the acting turn before it, or to the first acting turn
    rewards: dict[int, float] = {}
    pending = 0.0
    for turn, reward in zip(sample.trajectory.turns, sample.turn_rewards, strict=True):
        if turn.action_ids:
            rewards[turn.index] = reward + pending
            pending = 0.0
        elif rewards:
            rewards[max(rewards)] += reward
        else:
            pending += reward
    rewards[max(rewards)] += sample.outcome_reward
    return rewards


def _values_of_acting_turns(sample: TrainingSample) -> Iterator[float]:
    # the value of a turn without action tokens is that of the acting turn after it
    skipped = math.nan
    for turn in sample.trajectory.turns:
        value = sample.turn_values.get(turn.index, skipped)
        skipped = math.nan if turn.action_ids else value
        if turn.action_ids:
            yield value


def _add_observation(trajectory: Trajectory, turn: Turn, number: int, tokens: _TokenColumns) -> int | None:
    # the observation is in the batch only if the next turn continues this one, and acts
    following = trajectory.turns[turn.index + 1 : turn.index + 2]
    if not following or following[0].parent != turn.index or not following[0].new_ids or not following[0].action_ids:
        return None
    ids = following[0].new_ids
    # observation tokens have no log-probability, and get the version of the last action token before them
    version = turn.version_spans[-1].version
    return tokens.add(number, ids, [float("nan")] * len(ids), [version] * len(ids), is_action=False)


def _state_ids(samples: Sequence[TrainingSample]) -> Tensor:
    ids: dict[object, int] = {}
    found: list[int] = []
    for sample in samples:
        before: Sequence[Message] = sample.trajectory.start
        for turn in sample.trajectory.turns:
            if turn.action_ids:
                state = tuple((message.role, message.text, message.images) for message in before)
                found.append(ids.setdefault((sample.group, state), len(ids)))
            # a summary turn does not act in the environment, so the state does not change
            before = turn.observation if turn.kind == "act" else before
    return torch.tensor(found, dtype=torch.int64)
