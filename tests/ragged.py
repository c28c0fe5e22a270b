"""Hypothesis strategies for small random episodes of unequal lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Continuation, Group, Status, Trajectory, Turn
from agent_r1.data.batch import TrainingSample, select_trainable
from agent_r1.rollout.replay import valued_turns

VOCABULARY = 16
OPENING = (Message.user("begin"),)


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """A turn: it observed ``extra`` (only with long observations) and ``observed``, and sampled ``action``."""

    extra: tuple[int, ...]
    observed: tuple[int, ...]
    action: tuple[tuple[int, float], ...]
    """Each token with the log-probability that the sampler recorded."""
    reward: float = 0.0
    call_reward: float = 0.0
    state: int = 0
    """The state that the action led to."""
    back: int = 0
    """Its parent is this many turns before the previous one; it is a root if there is no such turn."""
    used_tool: bool = False


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """An attempt: its turns, two rewards for the whole, and whether it was truncated."""

    turns: tuple[TurnSpec, ...]
    score: float = 0.0
    style: float = 0.0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The attempts at one task, and the return of the greedy attempt."""

    attempts: tuple[AttemptSpec, ...]
    greedy_return: float = 0.0


Episodes = tuple[GroupSpec, ...]

REWARD = st.integers(-4, 4).map(lambda quarters: quarters / 4)
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)
ACTIONS = st.lists(st.tuples(TOKEN, st.integers(-14, -6).map(lambda quarters: quarters / 4)), min_size=1, max_size=3)
TURN = st.builds(
    TurnSpec,
    extra=st.lists(TOKEN, max_size=4).map(tuple),
    observed=TOKENS,
    action=ACTIONS.map(tuple),
    reward=REWARD,
    call_reward=REWARD,
    state=st.integers(0, 1),
    back=st.sampled_from([0, 0, 0, 1, 9]),
    used_tool=st.booleans(),
)
ATTEMPT = st.builds(
    AttemptSpec,
    turns=st.lists(TURN, min_size=1, max_size=3).map(tuple),
    score=REWARD,
    style=REWARD,
    truncated=st.booleans(),
)


def _groups(min_size: int) -> SearchStrategy[GroupSpec]:
    attempts = st.lists(ATTEMPT, min_size=min_size, max_size=4).map(tuple)
    return st.builds(GroupSpec, attempts=attempts, greedy_return=REWARD)


EPISODES: SearchStrategy[Episodes] = st.lists(_groups(1), min_size=1, max_size=3).map(tuple)
SEVERAL_GROUPS: SearchStrategy[Episodes] = st.lists(_groups(2), min_size=2, max_size=3).map(tuple)
"""At least two groups of at least two attempts, for tests in which each example is slow."""


def samples(episodes: Episodes, *, long_observations: bool = False) -> tuple[TrainingSample, ...]:
    """Return the training samples of these episodes."""
    groups = [_group(spec, group_id, long_observations) for group_id, spec in enumerate(episodes)]
    return select_trainable(groups, {}).samples


def _group(spec: GroupSpec, group_id: int, long_observations: bool) -> Group:
    greedy = AttemptSpec((TurnSpec((), (1,), ((2, -1.0),)),), score=spec.greedy_return)
    attempts = tuple(_trajectory(one, group_id, index, long_observations) for index, one in enumerate(spec.attempts))
    return Group(
        group_id,
        Task(f"task-{group_id}", OPENING),
        attempts,
        _trajectory(greedy, group_id, len(spec.attempts), long_observations),
        continuations=tuple(
            Continuation(one.attempt, turn, replace(one, rewards={"score": 0.5 * turn}))
            for one in attempts
            for turn in valued_turns(one)
        ),
    )


def _trajectory(spec: AttemptSpec, group_id: int, index: int, long_observations: bool) -> Trajectory:
    return Trajectory(
        attempt=AttemptId("run", f"task-{group_id}", group_id, index),
        task_id=f"task-{group_id}",
        turns=_turns(spec.turns, long_observations),
        status=Status.OUT_OF_TURNS if spec.truncated else Status.COMPLETED,
        truncated=spec.truncated,
        rewards={"score": spec.score, "style": spec.style},
        start=OPENING,
    )


def _turns(specs: Sequence[TurnSpec], long_observations: bool) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            index=index,
            parent=None if spec.back >= index else index - 1 - spec.back,
            new_ids=(*(spec.extra if long_observations else ()), *spec.observed),
            action_ids=tuple(token for token, _ in spec.action),
            logprobs=tuple(logprob for _, logprob in spec.action),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(""), ""),
            observation=(Message.tool(f"state {spec.state}", "call"),),
            results=(ToolResult((), ok=True),) if spec.used_tool else (),
            rewards={"step": spec.reward},
            call_rewards=({"call": spec.call_reward},),
            call_ends=(0,),
        )
        for index, spec in enumerate(specs)
    )
