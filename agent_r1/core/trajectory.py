"""What was lived: turns, trajectories, groups, and how they are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, Protocol

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import FinishReason, PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult


class Status(StrEnum):
    """How an episode ended. A malformed call or a failed tool is feedback, not an ending."""

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
"""The one policy table: what becomes of an attempt that ended so.

Train: it is learned from. Retry: another attempt takes its place in the group, so many times as the run's ``retries``
say; what failed is dropped with its reason, the last failure too. Drop: at once, because a reward that raises will
mostly raise again, and what ran past its deadline has cost enough.

A group of which nothing is learned, for whatever reason, is refilled where the algorithm asks for that. A step counts
every attempt it was given under the name of its status, those that were tried again too. What is not trained counts
as failed where it is asked whether a run can go on.
"""


TurnKind = Literal["act", "summary"]
"""act: an action in the world. summary: the policy sums up for itself what it no longer sees."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One transition of the step-level MDP (paper 2511.14460, section 2).

    The state is the parent's tokens (its state and its action) plus ``new_ids``; the action is
    exactly the tokens sampled. ``parent`` is None where a turn starts from nothing: the first turn,
    or one whose context was rewritten.

    ``rewards`` are process rewards by name for the action as a whole. ``call_rewards`` are those of its calls, one
    mapping per call in their order, or () where none were given; ``call_ends`` says for each call at which place of
    ``action_ids`` it ends, so that its rewards can be put on that token.

    Example:
        Turn(index=1, parent=0, new_ids=(5, 6), action_ids=(9, 2), logprobs=(-0.3, -0.1),
             spans=(PolicyVersionSpan(0, 4),), finish_reason="stop", action=action)
        continues turn 0: the observation is tokens 5 6, the action tokens 9 2.
    """

    index: int
    parent: int | None
    new_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[PolicyVersionSpan, ...]
    finish_reason: FinishReason
    action: Action
    observation: tuple[Message, ...] = ()
    results: tuple[ToolResult, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    role: str = "agent"
    kind: TurnKind = "act"
    call_rewards: tuple[Mapping[str, float], ...] = ()
    call_ends: tuple[int, ...] = ()


RewardValue = float | tuple[float, ...] | None
"""One number for the trajectory, one per turn (or per turn that met the world), or None: could not be scored, the
sample is dropped."""

Rewards = Mapping[str, RewardValue]


@dataclass(frozen=True, slots=True)
class Unscored:
    """What a scorer gives in place of a reward that could not be scored: why, in one line.

    Example:
        Unscored("KeyError: 'gold'")
    """

    reason: str


Scores = Mapping[str, RewardValue | Unscored]
"""What a scorer gives a trajectory."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one attempt, how it ended, and its rewards by name.

    ``truncated`` says that the episode did not end by itself (turns or tokens ran out), so a critic
    may bootstrap. ``reason`` explains a failure, or a reward that is None. ``start`` holds the messages that opened it.
    """

    attempt: AttemptId
    task_id: str
    turns: tuple[Turn, ...]
    status: Status
    truncated: bool = False
    rewards: Rewards = field(default_factory=dict)
    reason: str | None = None
    start: tuple[Message, ...] = ()
    seconds: float = 0.0

    def prompt_ids(self, turn: Turn) -> tuple[int, ...]:
        """The exact tokens the policy saw before it acted in ``turn``."""
        if turn.parent is None:
            return turn.new_ids
        before = self.turns[turn.parent]
        return self.prompt_ids(before) + before.action_ids + turn.new_ids

    @property
    def env_turns(self) -> tuple[Turn, ...]:
        """The turns that met the world; in the others the policy spoke to itself (``kind`` "summary")."""
        return tuple(turn for turn in self.turns if turn.kind == "act")

    def turns_for_rewards(self, count: int) -> tuple[Turn, ...] | None:
        """The turns that ``count`` numbers of a reward per turn belong to: all, or those that met the world."""
        return next((turns for turns in (self.turns, self.env_turns) if len(turns) == count), None)

    @property
    def last_text(self) -> str:
        """The raw text of the last action in the world, '' where there is none."""
        return self.env_turns[-1].action.text if self.env_turns else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the world as it happened, whatever of it the policy saw at a time."""
        said = list(self.start)
        for turn in self.env_turns:
            said += (turn.action.message, *turn.observation)
        return tuple(said)


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with each other; ``serial`` is the group's number in the run.

    ``greedy`` is one more attempt, by the most probable tokens, where an algorithm compares the others with it
    (ReMax, 2310.10505). It is none of ``trajectories``, and may have failed like any of them. ``retried`` are attempts
    that failed and whose place another took: of the same group and member, of a lower ``retry``.
    """

    serial: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    retried: tuple[Trajectory, ...] = ()


class Scorer(Protocol):
    """Gives each trajectory of a group its rewards by name. One that could not be scored is Unscored, or None."""

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]: ...
