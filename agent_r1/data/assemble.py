"""Assembly of the training batch from training samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

from agent_r1.core.messages import ContentPart, Message, Text
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.data.batch import NamedReward, RewardWeights, TrainingBatch
from agent_r1.data.segments import first_seen_ids
from agent_r1.data.sequences import Packing, TurnPlace
from agent_r1.data.training_sample import TrainingSample

TokenScope = Literal["actions", "all"]
"""The tokens that a batch holds. actions: action tokens only. all: also the observations between two actions."""


@dataclass(slots=True)
class _TokenColumns:
    """Lists with one entry per token of the batch. Tokens are added to these lists one turn after another."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add(
        self, turn: int, ids: Sequence[int], logprobs: Iterable[float], versions: Iterable[int], is_action: bool
    ) -> int:
        """Add tokens of the turn with the number ``turn``.

        Return the position in the batch of the first added token.
        """
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
    reward_weights: RewardWeights | None = None,
    loss_excluded: Sequence[str | None] | None = None,
) -> TrainingBatch:
    """Return the training batch of one or more samples.

    Args:
        samples: The training samples, with their rewards.
        packing: The function that converts a trajectory to token sequences for the model.
        scope: The tokens that the batch holds: "actions" for action tokens only, "all" for observation tokens too.
        reward_weights: Weights by the name of a reward. A reward without a weight has weight 1.
        loss_excluded: For each sample, the reason why the loss excludes the sample, or None. Excluded samples still
            count in baselines.
    """
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
    greedy = [float("nan") if sample.greedy_return is None else sample.greedy_return for sample in samples]
    states = [(sample.group, state) for sample in samples for state in _states(sample.trajectory)]
    return TrainingBatch(
        ids=torch.tensor(tokens.ids),  # (N,)
        sampler_logprobs=torch.tensor(tokens.logprobs, dtype=torch.float64),
        versions=torch.tensor(tokens.versions),
        action_mask=torch.tensor(tokens.action_mask),
        token_rewards=torch.tensor(tokens.rewards, dtype=torch.float64),
        token_turn=torch.tensor(tokens.turns),  # (N,)
        turn_trajectory=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([*map(len, acting)])),  # (S,)
        turn_state_ids=first_seen_ids(states),  # (S,) turns of different groups never have the same state
        turn_used_tool=torch.tensor([bool(turn.results) for turn in chain.from_iterable(acting)]),
        turn_is_summary=torch.tensor([turn.kind == "summary" for turn in chain.from_iterable(acting)]),
        trajectory_group=torch.tensor([sample.group for sample in samples]),  # (M,)
        outcome_rewards=torch.tensor([sample.outcome_reward for sample in samples], dtype=torch.float64),
        greedy_return=torch.tensor(greedy, dtype=torch.float64),
        role_baseline=torch.zeros(len(samples), dtype=torch.float64),
        truncated=torch.tensor([sample.trajectory.truncated for sample in samples]),
        loss_excluded=(None,) * len(samples) if loss_excluded is None else tuple(loss_excluded),
        named_rewards=_named_rewards(samples, reward_weights or {}),
        attempts=tuple(sample.trajectory.attempt for sample in samples),
        sequences=tuple(
            sequence
            for number, (sample, turn_places) in enumerate(zip(samples, places, strict=True))
            for sequence in packing(sample.trajectory, number, turn_places)
        ),
    )


def _add_tokens(sample: TrainingSample, tokens: _TokenColumns, first: int, scope: TokenScope) -> list[TurnPlace]:
    """Add the tokens of a sample to ``tokens``, and return the place in the batch of each turn of the sample.

    Turns with action tokens get the numbers ``first``, ``first`` + 1, and so on. A turn without action tokens adds no
    tokens, and its place has the number of the turn before it. With the ``scope`` "all", observation tokens are added
    too.
    """
    places: list[TurnPlace] = []
    rewards = _rewards_of_acting_turns(sample)
    number, observation = first - 1, None
    for turn in sample.trajectory.turns:
        if not turn.action_ids:
            places.append(TurnPlace(number, len(tokens.ids)))
            continue
        number += 1
        position = tokens.add(number, turn.action_ids, turn.logprobs, _versions(turn), is_action=True)
        places.append(TurnPlace(number, position, observation))
        # the reward of a call is on the token that ends the call, the reward of the turn on its last action token
        for end, reward in zip(turn.call_ends, sample.call_rewards[turn.index], strict=False):
            tokens.rewards[position + end] += reward
        tokens.rewards[position + len(turn.action_ids) - 1] += rewards[turn.index]
        observation = _add_observation(sample.trajectory, turn, number, tokens) if scope == "all" else None
    return places


def _rewards_of_acting_turns(sample: TrainingSample) -> dict[int, float]:
    """Return the reward of each turn with action tokens, by turn index.

    The last of these rewards includes the outcome reward. The reward of a turn without action tokens is added to the
    nearest earlier turn with action tokens. If there is no earlier one, it is added to the first turn with action
    tokens.

    Example:
        Turn rewards 0.25, 0.25 and 0.0, outcome reward 1.0, no action tokens in turn 1 -> {0: 0.5, 2: 1.0}
    """
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


def _add_observation(trajectory: Trajectory, turn: Turn, number: int, tokens: _TokenColumns) -> int | None:
    """Add the tokens of the observation after the action of ``turn``. Return the position of the first of these tokens.

    ``number`` is the number of ``turn`` in the batch. The observation is the new tokens of the next turn. Add nothing
    and return None in three cases: the next turn does not continue ``turn``, has no new tokens, or has no action
    tokens.
    """
    following = trajectory.turns[turn.index + 1 : turn.index + 2]
    if not following or following[0].parent != turn.index or not following[0].new_ids or not following[0].action_ids:
        return None
    ids = following[0].new_ids
    # observation tokens have no log-probability, and get the version of the last action token before them
    version = turn.version_spans[-1].version
    return tokens.add(number, ids, [float("nan")] * len(ids), [version] * len(ids), is_action=False)


def _versions(turn: Turn) -> list[int]:
    """Return, for each action token of the turn, the version of the weights that sampled the token."""
    # a span ends at the start of the next span
    ends = [*(span.start for span in turn.version_spans[1:]), len(turn.action_ids)]
    return [span.version for span, end in zip(turn.version_spans, ends, strict=True) for _ in range(span.start, end)]


State = tuple[tuple[str, tuple[ContentPart, ...]], ...]
"""The role, the texts and the images of each message in the last observation before a turn."""


def _states(trajectory: Trajectory) -> list[State]:
    """Return the state before each turn with action tokens, in order.

    A state is the (role, content) of each message in the last observation of the environment. Before the first
    observation, it is the (role, content) of each opening message.
    """
    before: Sequence[Message] = trajectory.start
    states: list[State] = []
    for turn in trajectory.turns:
        if turn.action_ids:
            states.append(tuple((message.role, (Text(message.text), *message.images)) for message in before))
        # a summary turn does not act in the environment, so the state does not change
        before = turn.observation if turn.kind == "act" else before
    return states


def _named_rewards(samples: Sequence[TrainingSample], weights: Mapping[str, float]) -> tuple[NamedReward, ...]:
    # if a trajectory has no reward with a name, its return for this name is 0
    names = sorted({name for sample in samples for name in sample.named_rewards})
    return tuple(
        NamedReward(
            name,
            weights.get(name, 1.0),
            torch.tensor([sample.named_rewards.get(name, 0.0) for sample in samples], dtype=torch.float64),
        )
        for name in names
    )
