"""Turns, trajectories and groups of trajectories, and their rewards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

from agent_r1.core.inference import FinishReason, PolicyVersionSpan, PromptMedia
from agent_r1.core.messages import Action, Message, ToolResult, ToolSpec
from agent_r1.core.task import Task


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """The identity of one attempt at one task.

    Example:
        >>> str(AttemptId("demo", "style-a/7", 3, 0))
        'demo:3.0.0:style-a/7'
    """

    run: str
    task: str
    group_id: int  # the index of the group in the run
    sample_index: int  # the index of the attempt in its group
    retry: int = 0  # the number of failed attempts that this attempt replaces

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return (self.group_id, self.sample_index, self.retry)

    def seed(self, root: int, *path: int) -> int:
        """Return a 63-bit seed for the random numbers of the attempt."""
        text = f"{root}|{self.task}|{self.sort_key}|{path}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def __str__(self) -> str:
        return f"{self.run}:{self.group_id}.{self.sample_index}.{self.retry}:{self.task}"


class Status(StrEnum):
    """How an episode ended. A malformed tool call or a failed tool has no status: the episode continues."""

    COMPLETED = "completed"
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"
    ENVIRONMENT_FAILED = "environment_failed"
    ENGINE_FAILED = "engine_failed"
    REWARD_FAILED = "reward_failed"
    CANCELLED = "cancelled"


StatusPolicy = Literal["train", "retry", "drop"]

STATUS_POLICY: Mapping[Status, StatusPolicy] = MappingProxyType(
    {
        Status.COMPLETED: "train",
        Status.OUT_OF_TURNS: "train",
        Status.OUT_OF_TOKENS: "train",
        Status.ENVIRONMENT_FAILED: "retry",
        Status.ENGINE_FAILED: "retry",
        Status.REWARD_FAILED: "drop",
        Status.CANCELLED: "drop",
    }
)
"""Whether an attempt with each status is trained, replaced by a new attempt (at most ``retries`` times), or dropped,
because a new attempt would probably fail too. Too many failures stop the run (see :mod:`agent_r1.training.monitor`)."""


TurnKind = Literal["act", "summary"]
"""act: an action in the environment. summary: the policy summarizes messages that it will no longer see."""


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """The times of a turn, in seconds. All times except ``env_seconds`` count from the start of the attempt."""

    start_seconds: float  # when the action was requested from the engine
    end_seconds: float
    first_token_seconds: float | None = None  # None if the engine does not report it
    # how long the environment took, including moves of other players; of an agent program: until its next request
    env_seconds: float = 0.0

    @property
    def engine_seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """One transition of the step-level MDP (arXiv:2511.14460, section 2): a state and an action.

    The action is the sampled tokens. The state is all tokens that the policy saw before the action.
    """

    index: int
    parent: int | None  # the turn that this turn continues; None for the first turn, and if the context was rewritten
    new_ids: tuple[int, ...]  # the tokens between the parent's action and this action; without a parent, the state
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of action_ids, as the engine reported them
    version_spans: tuple[PolicyVersionSpan, ...]
    finish_reason: FinishReason
    action: Action
    observation: tuple[Message, ...] = ()  # the answer of the environment
    results: tuple[ToolResult, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)  # process rewards of the whole action, by name
    kind: TurnKind = "act"
    call_rewards: tuple[Mapping[str, float], ...] = ()  # of each tool call, in order; (): no call is rewarded
    call_ends: tuple[int, ...] = ()  # for each call, the index in action_ids of its last token, which gets its rewards
    new_messages: tuple[Message, ...] = ()  # the messages of new_ids
    tools: tuple[ToolSpec, ...] | None = None  # of an agent program or of the task; None: the tools of the run
    media: tuple[PromptMedia, ...] = ()  # the images in new_ids; their spans count from the start of new_ids
    timing: TurnTiming | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a trajectory: turns, each of which continues the turn before."""

    turns: tuple[Turn, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages that the policy read and wrote, and then the observation after the last action."""
        messages: list[Message] = []
        for turn in self.turns:
            messages += (*turn.new_messages, turn.action.message)
        return (*messages, *self.turns[-1].observation)

    @property
    def tools(self) -> tuple[ToolSpec, ...] | None:
        return self.turns[-1].tools


RewardValue = float | tuple[float, ...] | None
"""A number for the trajectory, or one number per turn (perhaps without summaries). None: the attempt is dropped."""

Rewards = Mapping[str, RewardValue]


@dataclass(frozen=True, slots=True)
class Unscored:
    """The value of a reward that a scorer could not compute, with the reason in one line."""

    reason: str


Scores = Mapping[str, RewardValue | Unscored]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one attempt, its status, and its rewards by name."""

    attempt: AttemptId
    task_id: str
    turns: tuple[Turn, ...]
    status: Status
    truncated: bool = False  # the episode was cut off, for example because turns or tokens ran out
    rewards: Rewards = field(default_factory=dict)
    reason: str | None = None  # why the episode failed, or why a reward could not be computed
    start: tuple[Message, ...] = ()  # the opening of the episode
    seconds: float = 0.0
    answer: str | None = None  # of an agent program; None: the answer is the last text of the policy
    start_time: float = field(default=0.0, compare=False)  # in seconds since 1970; 0.0 if not measured
    wait_seconds: float = field(default=0.0, compare=False)  # how long the limit ``concurrency`` delayed the start

    def prompt_ids(self, turn: Turn) -> tuple[int, ...]:
        """Return the exact tokens that the policy saw before its action in ``turn``."""
        if turn.parent is None:
            return turn.new_ids
        before = self.turns[turn.parent]
        return self.prompt_ids(before) + before.action_ids + turn.new_ids

    def known_messages(self, turn: Turn) -> tuple[Message, ...]:
        """Return the messages between the previous action and the action of ``turn``, if no context was rewritten."""
        return self.start if turn.parent is None else self.turns[turn.parent].observation

    def new_context(self, turn: Turn) -> tuple[Message, ...]:
        """Return ``turn.new_messages``, or () if they are equal to :meth:`known_messages`."""
        return () if turn.new_messages == self.known_messages(turn) else turn.new_messages

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The branches of the trajectory, in the order of their last turns."""
        continued = {turn.parent for turn in self.turns}
        return tuple(Branch(self._path_to(turn)) for turn in self.turns if turn.index not in continued)

    def _path_to(self, turn: Turn) -> tuple[Turn, ...]:
        return (*(() if turn.parent is None else self._path_to(self.turns[turn.parent])), turn)

    def prompt_media(self, turn: Turn) -> tuple[PromptMedia, ...]:
        """Return the images that the policy saw before its action in ``turn``, with spans in :meth:`prompt_ids`."""
        if turn.parent is None:
            return turn.media
        before = self.turns[turn.parent]
        start = len(self.prompt_ids(before)) + len(before.action_ids)
        return (*self.prompt_media(before), *(media.moved(start) for media in turn.media))

    @property
    def has_images(self) -> bool:
        """Whether the policy saw an image. An image shown as a line of text does not count."""
        return any(turn.media for turn in self.turns)

    @property
    def env_turns(self) -> tuple[Turn, ...]:
        """The turns that act in the environment: all turns except summaries of the context."""
        return tuple(turn for turn in self.turns if turn.kind == "act")

    def turns_for_rewards(self, count: int) -> tuple[Turn, ...] | None:
        """Return all turns, or those in the environment, if their number is ``count``; otherwise None."""
        return next((turns for turns in (self.turns, self.env_turns) if len(turns) == count), None)

    @property
    def last_text(self) -> str:
        """The raw text of the last action in the environment, or ''."""
        return self.env_turns[-1].action.text if self.env_turns else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The full conversation between policy and environment, of which the policy may have seen only parts."""
        conversation = list(self.start)
        for turn in self.env_turns:
            conversation += (turn.action.message, *turn.observation)
        return tuple(conversation)


@dataclass(frozen=True, slots=True)
class Continuation:
    """An attempt that repeats the turns of ``attempt`` before ``turn`` and is sampled from there: its return is a
    sample of the value of that state. It is not recorded, and not trained on.
    """

    attempt: AttemptId
    turn: int
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with each other."""

    group_id: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    # sampled greedily; its return is the baseline of ReMax (arXiv:2310.10505); it can have failed
    greedy: Trajectory | None = None
    retried: tuple[Trajectory, ...] = ()  # failed attempts that were replaced
    # a solution that a script played, because no attempt was a success; it is imitated, and not recorded as an attempt
    example: Trajectory | None = None
    continuations: tuple[Continuation, ...] = ()  # scored, for the values of turns
    role: str = ""  # in a game of several agents, such as nim/first; the algorithm rae has one baseline per role


class Scorer(Protocol):
    """An object that computes the rewards of a group."""

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        """Return the rewards of each trajectory by name. A reward that cannot be computed is Unscored or None."""
        ...


T = TypeVar("T")

MAX_REWARD = 1e300
"""The largest absolute value of a reward that counts as finite. No sum of such rewards overflows."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward, multiplied by its weight."""

    name: str
    value: float
    turn: int | None = None  # None for a reward of the whole trajectory
    call: int | None = None  # the index of the tool call; None for a reward of the whole turn or trajectory


def with_weights(rewards: Mapping[str, T], weights: Mapping[str, float]) -> Iterator[tuple[str, float, T]]:
    """Yield (name, weight, value) of each reward whose weight is not 0. A reward without a weight has weight 1."""
    for name, value in rewards.items():
        if weight := weights.get(name, 1.0):
            yield name, weight, value


def weighted_rewards(trajectory: Trajectory, weights: Mapping[str, float]) -> Iterator[WeightedReward]:
    """Yield each reward of a trajectory, multiplied by its weight, without rewards that are None or have weight 0."""
    for number, turn in enumerate(trajectory.turns):
        for name, weight, value in with_weights(turn.rewards, weights):
            yield WeightedReward(name, weight * value, number)
        for call, rewards in enumerate(turn.call_rewards):
            for name, weight, value in with_weights(rewards, weights):
                yield WeightedReward(name, weight * value, number, call)
    for name, weight, reward in with_weights(trajectory.rewards, weights):
        if isinstance(reward, tuple):  # one number per turn
            for turn, value in zip(trajectory.turns_for_rewards(len(reward)) or (), reward, strict=False):
                yield WeightedReward(name, weight * value, turn.index)
        elif reward is not None:
            yield WeightedReward(name, weight * reward)


def can_be_summed(value: float) -> bool:
    """Return whether the absolute value of a reward is at most ``MAX_REWARD``. NaN gives False."""
    return abs(value) <= MAX_REWARD


def total_reward(trajectory: Trajectory, weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of all rewards of a trajectory (its return R), or None if it cannot be trained on."""
    missing = any(reward is None for _, _, reward in with_weights(trajectory.rewards, weights))
    if missing or STATUS_POLICY[trajectory.status] != "train":
        return None
    values = [reward.value for reward in weighted_rewards(trajectory, weights)]
    return math.fsum(values) if all(map(can_be_summed, values)) else None


@dataclass(frozen=True, slots=True)
class RewardSchedule:
    """A factor for the weight of a reward, interpolated linearly between ``points``, pairs (step, factor).

    Example:
        >>> RewardSchedule.parse("1:0, 11:1").factor(6)
        0.5
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str) -> RewardSchedule:
        """Parse a list of STEP:FACTOR, such as ``1:0,50:1``. Raise ValueError if ``text`` is not such a list."""
        points = []
        for part in text.split(","):
            step, colon, factor = part.partition(":")
            if not colon or not step.strip().isdecimal() or len(step.strip()) > 9:
                raise ValueError(f"give STEP:FACTOR,STEP:FACTOR, such as 1:0,50:1; this part is neither: {part!r}")
            points.append((int(step), float(factor)))
        if any(after <= before for (before, _), (after, _) in pairwise(points)):
            raise ValueError("give rising steps, such as 1:0,50:1")
        if not all(math.isfinite(factor) for _, factor in points):
            raise ValueError("give finite factors, such as 1:0,50:1")
        return cls(tuple(points))

    def factor(self, step: int) -> float:
        """Return the factor for the weight of the reward at ``step``. The first step of a run is step 1."""
        for (start, low), (end, high) in pairwise(self.points):
            if start <= step <= end:
                return low + (high - low) * (step - start) / (end - start)
        return self.points[0][1] if step < self.points[0][0] else self.points[-1][1]
