"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch

from agent_r1.core.messages import Message
from agent_r1.core.trajectory import Trajectory, Turn
from agent_r1.data.batch import TrainingBatch, NamedReturns, RewardWeights
from agent_r1.data.segments import numbered
from agent_r1.data.sequences import Packing, TurnPlace
from agent_r1.data.training_sample import TrainingSample

Scope = Literal["actions", "episodes"]
"""Which tokens are in a batch: the actions, or also what was observed between them."""


@dataclass(slots=True)
class _Tokens:
    """The columns of a batch that have one entry per token, as they grow."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def add(
        self, turn: int, ids: Sequence[int], logprobs: Iterable[float], versions: Iterable[int], chosen: bool
    ) -> int:
        """Append tokens of a turn; gives the place of the first."""
        place = len(self.ids)
        self.ids += ids
        self.logprobs += logprobs
        self.versions += versions
        self.chosen += [chosen] * len(ids)
        self.rewards += [0.0] * len(ids)
        self.turns += [turn] * len(ids)
        return place


def assemble(
    samples: Sequence[TrainingSample],
    layout: Packing,
    scope: Scope = "actions",
    reward_weights: RewardWeights | None = None,
    muted: Sequence[str | None] | None = None,
) -> TrainingBatch:
    """The batch of these samples (at least one), with their sequences laid out by ``layout``.

    ``muted`` says for each sample why it is compared with and not learned from, None where it is.
    """
    tokens = _Tokens()
    places: list[list[TurnPlace]] = []
    turns = 0
    for sample in samples:
        laid = _lay_out(sample, tokens, turns, scope)
        turns += sum(bool(turn.action_ids) for turn in sample.trajectory.turns)
        places.append(laid)
    acting = [[turn for turn in sample.trajectory.turns if turn.action_ids] for sample in samples]
    return TrainingBatch(
        ids=torch.tensor(tokens.ids),
        sampler_logprobs=torch.tensor(tokens.logprobs, dtype=torch.float64),
        versions=torch.tensor(tokens.versions),
        chosen=torch.tensor(tokens.chosen),
        token_rewards=torch.tensor(tokens.rewards, dtype=torch.float64),
        token_turn=torch.tensor(tokens.turns),
        turn_trajectory=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([*map(len, acting)])),
        turn_states=numbered([(sample.group, state) for sample in samples for state in _states(sample.trajectory)]),
        turn_results=torch.tensor([bool(turn.results) for turn in chain.from_iterable(acting)]),
        trajectory_group=torch.tensor([sample.group for sample in samples]),
        outcomes=torch.tensor([sample.outcome for sample in samples], dtype=torch.float64),
        greedy=torch.tensor([_number(sample.greedy) for sample in samples], dtype=torch.float64),
        truncated=torch.tensor([sample.trajectory.truncated for sample in samples]),
        muted=(None,) * len(samples) if muted is None else tuple(muted),
        named=_named(samples, reward_weights or {}),
        attempts=tuple(sample.trajectory.attempt for sample in samples),
        sequences=tuple(
            sequence
            for number, (sample, laid) in enumerate(zip(samples, places, strict=True))
            for sequence in layout(sample.trajectory, number, laid)
        ),
    )


def _lay_out(sample: TrainingSample, tokens: _Tokens, first: int, scope: Scope) -> list[TurnPlace]:
    """Add the tokens of a sample, whose first acting turn has number ``first``; where each of its turns stands."""
    places: list[TurnPlace] = []
    earned = _acting_rewards(sample)
    number, observation = first - 1, None
    for turn in sample.trajectory.turns:
        if not turn.action_ids:
            places.append(TurnPlace(number, len(tokens.ids)))
            continue
        number += 1
        place = tokens.add(number, turn.action_ids, turn.logprobs, _versions(turn), chosen=True)
        places.append(TurnPlace(number, place, observation))
        for end, reward in zip(turn.call_ends, sample.call_rewards[turn.index], strict=False):
            tokens.rewards[place + end] += reward
        tokens.rewards[place + len(turn.action_ids) - 1] += earned[turn.index]
        observation = _observe(sample.trajectory, turn, number, tokens) if scope == "episodes" else None
    return places


def _acting_rewards(sample: TrainingSample) -> dict[int, float]:
    """What each acting turn earned, by its index: what a turn without tokens earned goes to the last before it that has
    some (or the first after it), the outcome to the last of all."""
    earned: dict[int, float] = {}
    waiting = 0.0
    for turn, reward in zip(sample.trajectory.turns, sample.turn_rewards, strict=True):
        if turn.action_ids:
            earned[turn.index] = reward + waiting
            waiting = 0.0
        elif earned:
            earned[max(earned)] += reward
        else:
            waiting += reward
    earned[max(earned)] += sample.outcome
    return earned


def _observe(trajectory: Trajectory, turn: Turn, number: int, tokens: _Tokens) -> int | None:
    """Add what the next turn saw after ``turn``'s action, where it goes on from there; the place of its first token."""
    following = trajectory.turns[turn.index + 1 : turn.index + 2]
    if not following or following[0].parent != turn.index or not following[0].new_ids or not following[0].action_ids:
        return None
    ids = following[0].new_ids
    version = turn.version_spans[-1].version
    return tokens.add(number, ids, [float("nan")] * len(ids), [version] * len(ids), chosen=False)


def _versions(turn: Turn) -> list[int]:
    """The version of the weights behind each action token."""
    ends = [*(span.start for span in turn.version_spans[1:]), len(turn.action_ids)]
    return [span.version for span, end in zip(turn.version_spans, ends, strict=True) for _ in range(span.start, end)]


State = tuple[str, tuple[tuple[str, str], ...]]
"""Whether a turn acts or sums up, and what the world had just said."""


def _states(trajectory: Trajectory) -> list[State]:
    """For each acting turn what the world had just said: the opening, then what the last turn in it observed."""
    before: Sequence[Message] = trajectory.start
    states: list[State] = []
    for turn in trajectory.turns:
        if turn.action_ids:
            states.append((turn.kind, tuple((message.role, message.text) for message in before)))
        before = turn.observation if turn.kind == "act" else before
    return states


def _named(samples: Sequence[TrainingSample], weights: Mapping[str, float]) -> tuple[NamedReturns, ...]:
    names = sorted({name for sample in samples for name in sample.named})
    return tuple(
        NamedReturns(
            name,
            weights.get(name, 1.0),
            torch.tensor([sample.named.get(name, 0.0) for sample in samples], dtype=torch.float64),
        )
        for name in names
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
