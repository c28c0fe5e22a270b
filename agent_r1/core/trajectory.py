"""Turns, trajectories and groups of trajectories, and their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, Protocol

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import FinishReason, PolicyVersionSpan, PromptMedia
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult, ToolSpec


class Status(StrEnum):
    """The way in which an episode ended.

    There is no status for a malformed tool call or a failed tool. The agent gets an explanation as its observation, and
    the episode continues.
    """

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
"""Whether an attempt with each status is trained, retried or dropped. No other code contains this rule.

- train: the attempt is used for training.
- retry: the attempt is dropped, and a new attempt replaces it in its group. After ``retries`` new attempts, a failed
  attempt is only dropped.
- drop: the attempt is dropped without a new attempt. A reward function that raised an error would probably raise an
  error again, and a new attempt after an exceeded deadline would take as long as the first attempt.

If no attempt of a group can be trained on, an algorithm with refills requests a new group. The metrics of a step count
every attempt by its status, including retried attempts. The circuit breaker counts an attempt as failed if this table
has "retry" or "drop" for its status.
"""


TurnKind = Literal["act", "summary"]
"""act: an action in the environment. summary: the policy summarizes messages that the policy will no longer see."""


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """When the action of a turn was requested and sampled, in seconds since the start of the attempt.

    Attributes:
        start_seconds: when the action was requested from the engine.
        end_seconds: when the engine returned the action.
        first_token_seconds: when the engine had sampled the first token; None if the engine does not report this time.
        env_seconds: how long the environment took to respond to the action. In a game, the moves of the other players
            are included. For an agent program, this is the time until the next request of the program.

    Example:
        TurnTiming(start_seconds=0.5, end_seconds=0.8, first_token_seconds=0.6, env_seconds=1.2)
    """

    start_seconds: float
    end_seconds: float
    first_token_seconds: float | None = None
    env_seconds: float = 0.0

    @property
    def engine_seconds(self) -> float:
        """The seconds from the request for the action until the engine returned the action."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """One transition of the step-level MDP (arXiv:2511.14460, section 2): a state and an action.

    The action is the sampled tokens. The state is all tokens that the policy saw: the state of the parent turn, the
    action of the parent turn, and then ``new_ids``.

    Attributes:
        parent: the index of the turn that this turn continues, or None if this turn starts a new branch (the first
            turn, or a turn whose context was rewritten).
        new_ids: the tokens of the state that follow the parent's action; the whole state if there is no parent.
        new_messages: the messages of the state that follow the parent's action; the whole conversation if there is no
            parent.
        tools: the tools that an agent program named in the request for this turn; None if the tools of the environment
            are used, because there is no agent program.
        action_ids: the sampled tokens.
        logprobs: the log-probabilities of ``action_ids``, as the engine reported them.
        rewards: process rewards of the action as a whole, by name.
        call_rewards: for each tool call, in order, its process rewards by name. (): no call is rewarded.
        call_ends: for each call, the index in ``action_ids`` of the token that completes the call. The rewards of the
            call are assigned to this token.
        media: the images in ``new_ids``. Their indices count from the first token of ``new_ids``.
        timing: when the turn happened; None if the time was not measured. Comparisons (``==``) ignore the timing,
            because no repetition of an attempt has the same timing.

    Example:
        Turn(index=1, parent=0, new_ids=(5, 6), action_ids=(9, 2), logprobs=(-0.3, -0.1),
             version_spans=(PolicyVersionSpan(0, 4),), finish_reason="stop", action=action)
        # This turn continues turn 0: the observation is the tokens 5 6, the action is the tokens 9 2.
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
    kind: TurnKind = "act"
    call_rewards: tuple[Mapping[str, float], ...] = ()
    call_ends: tuple[int, ...] = ()
    new_messages: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] | None = None
    media: tuple[PromptMedia, ...] = ()
    timing: TurnTiming | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One branch of a trajectory: a conversation as the policy saw it, and the observation after its last action.

    ``turns`` are the turns of the branch. Each turn continues the turn before it. ``messages`` are all messages of the
    conversation, and then the observation after the last action, which the policy did not see. ``tools`` is None if the
    tools of the environment are used.
    """

    turns: tuple[Turn, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        messages: list[Message] = []
        for turn in self.turns:
            messages += (*turn.new_messages, turn.action.message)
        return (*messages, *self.turns[-1].observation)

    @property
    def tools(self) -> tuple[ToolSpec, ...] | None:
        return self.turns[-1].tools


RewardValue = float | tuple[float, ...] | None
"""The value of one reward: a number for the trajectory, a tuple with one number per turn, or None.

A tuple has a number for every turn, or for every turn except the turns in which the policy summarizes its context. None
means that the reward could not be computed; the attempt is then dropped.
"""

Rewards = Mapping[str, RewardValue]


@dataclass(frozen=True, slots=True)
class Unscored:
    """The value of a reward that a scorer could not compute, with the reason in one line.

    Example:
        Unscored("KeyError: 'gold'")
    """

    reason: str


Scores = Mapping[str, RewardValue | Unscored]
"""The rewards of a trajectory by name, as returned by a scorer."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one attempt, its status, and its rewards by name.

    Attributes:
        truncated: whether the episode was cut off, for example because turns or tokens ran out.
        reason: the reason for a failure of the episode, or for a reward that could not be computed.
        start: the opening messages of the episode.
        seconds: the duration of the attempt.
        answer: the answer that an agent program returned; None if the last text of the policy is the answer.
        start_time: the time at which the attempt started, in seconds since 1970; 0.0 if it was not measured.
        wait_seconds: how long the attempt waited before its start. An attempt waits while as many attempts run as the
            setting ``concurrency`` allows.
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
    answer: str | None = None
    start_time: float = field(default=0.0, compare=False)
    wait_seconds: float = field(default=0.0, compare=False)

    def prompt_ids(self, turn: Turn) -> tuple[int, ...]:
        """Return the exact tokens that the policy saw before its action in ``turn``."""
        if turn.parent is None:
            return turn.new_ids
        before = self.turns[turn.parent]
        return self.prompt_ids(before) + before.action_ids + turn.new_ids

    def known_messages(self, turn: Turn) -> tuple[Message, ...]:
        """Return the observation of the turn's parent. If ``turn`` has no parent, return the opening messages.

        These messages differ from ``turn.new_messages`` if the context was rewritten, if a sub-agent has a conversation
        of its own, or if an agent continues one action in two ways.
        """
        return self.start if turn.parent is None else self.turns[turn.parent].observation

    def new_context(self, turn: Turn) -> tuple[Message, ...]:
        """Return the new messages of ``turn`` if a display of the attempt must show them; otherwise ().

        A display shows the opening messages first, and the observation after each turn. So it must show the new
        messages of ``turn`` only if they differ from these messages (see :meth:`known_messages`).
        """
        return () if turn.new_messages == self.known_messages(turn) else turn.new_messages

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """The branches of the trajectory, in the order of their last turns. Branches can share their first turns."""
        continued = {turn.parent for turn in self.turns}
        return tuple(Conversation(self._path_to(turn)) for turn in self.turns if turn.index not in continued)

    def _path_to(self, turn: Turn) -> tuple[Turn, ...]:
        return (*(() if turn.parent is None else self._path_to(self.turns[turn.parent])), turn)

    def prompt_media(self, turn: Turn) -> tuple[PromptMedia, ...]:
        """Return the images that the policy saw before its action in ``turn``.

        The indices of an image are the positions of its placeholder tokens in ``prompt_ids``.
        """
        if turn.parent is None:
            return turn.media
        before = self.turns[turn.parent]
        start = len(self.prompt_ids(before)) + len(before.action_ids)
        return (*self.prompt_media(before), *(media.moved(start) for media in turn.media))

    @property
    def has_images(self) -> bool:
        """Whether the policy saw an image. An image that the policy saw only as a line of text does not count."""
        return any(turn.media for turn in self.turns)

    @property
    def env_turns(self) -> tuple[Turn, ...]:
        """The turns that act in the environment: all turns except summaries of the context."""
        return tuple(turn for turn in self.turns if turn.kind == "act")

    def turns_for_rewards(self, count: int) -> tuple[Turn, ...] | None:
        """Return the turns to which a list of ``count`` rewards belongs, one reward per turn.

        If the trajectory has ``count`` turns, return all turns. Otherwise, if ``count`` of its turns are not summaries
        (``env_turns``), return these turns. Otherwise return None.

        Example: in a trajectory with the turns act, summary, act, three rewards belong to all turns. Two rewards belong
        to the two act turns.
        """
        return next((turns for turns in (self.turns, self.env_turns) if len(turns) == count), None)

    @property
    def last_text(self) -> str:
        """The raw text of the last action that the environment got; '' if the environment got no action."""
        return self.env_turns[-1].action.text if self.env_turns else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The full conversation between policy and environment.

        The policy may have seen only parts of the conversation.
        """
        conversation = list(self.start)
        for turn in self.env_turns:
            conversation += (turn.action.message, *turn.observation)
        return tuple(conversation)


@dataclass(frozen=True, slots=True)
class Group:
    """The attempts at one task that are compared with each other.

    Attributes:
        group_id: the number of the group in the run.
        greedy: an additional attempt that was sampled greedily, or None. Some algorithms use its return as the baseline
            (ReMax, arXiv:2310.10505). This attempt is not in ``trajectories``, and it can have failed.
        retried: failed attempts. Each failed attempt was replaced by a new attempt with the same sample index and a
            higher ``retry``.
        role: the role of the attempts in a game of several agents, such as ``nim/first``. Algorithms with a baseline
            per role (RAE) compare an attempt only with attempts of the same role.
    """

    group_id: int
    task: Task
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    retried: tuple[Trajectory, ...] = ()
    role: str = ""


class Scorer(Protocol):
    """An object that computes the rewards of the trajectories of a group.

    ``score`` returns one mapping per trajectory, in the order of the group: the rewards by name. A reward that cannot
    be computed is Unscored or None.
    """

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]: ...
