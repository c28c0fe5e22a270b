"""Small random ragged episodes: what properties of learning are looked for in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.data.training_sample import TrainingSample, select_trainable

VOCABULARY = 16
OPENING = (Message.user("begin"),)


@dataclass(frozen=True, slots=True)
class Lived:
    """A turn: it saw ``extra`` and ``seen`` (``extra`` only where the world is talkative), and said ``said``.

    ``room`` is the state it led to, ``tool`` says that a tool answered. It goes on from the turn ``back`` turns before
    the last one, from nothing where there is none.
    """

    extra: tuple[int, ...]
    seen: tuple[int, ...]
    said: tuple[tuple[int, float], ...]
    """Each token with what the sampler recorded as its log-probability."""
    reward: float = 0.0
    call_reward: float = 0.0
    room: int = 0
    back: int = 0
    tool: bool = False


@dataclass(frozen=True, slots=True)
class Attempted:
    """An attempt: its turns, two rewards for the whole, and whether it was cut."""

    turns: tuple[Lived, ...]
    score: float = 0.0
    style: float = 0.0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """Attempts at one task, and what a greedy one earned."""

    attempts: tuple[Attempted, ...]
    greedy: float = 0.0


Episodes = tuple[Compared, ...]

REWARD = st.integers(-4, 4).map(lambda quarters: quarters / 4)
TOKEN = st.integers(0, VOCABULARY - 1)
TOKENS = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)
CHOICES = st.lists(st.tuples(TOKEN, st.integers(-14, -6).map(lambda quarters: quarters / 4)), min_size=1, max_size=3)
TURN = st.builds(
    Lived,
    extra=st.lists(TOKEN, max_size=4).map(tuple),
    seen=TOKENS,
    said=CHOICES.map(tuple),
    reward=REWARD,
    call_reward=REWARD,
    room=st.integers(0, 1),
    back=st.sampled_from([0, 0, 0, 1, 9]),
    tool=st.booleans(),
)
ATTEMPT = st.builds(
    Attempted,
    turns=st.lists(TURN, min_size=1, max_size=3).map(tuple),
    score=REWARD,
    style=REWARD,
    truncated=st.booleans(),
)


def _compared(least: int) -> SearchStrategy[Compared]:
    return st.builds(Compared, attempts=st.lists(ATTEMPT, min_size=least, max_size=4).map(tuple), greedy=REWARD)


EPISODES: SearchStrategy[Episodes] = st.lists(_compared(1), min_size=1, max_size=3).map(tuple)
SEVERAL: SearchStrategy[Episodes] = st.lists(_compared(2), min_size=2, max_size=3).map(tuple)
"""Where each example is dear: at least two groups of at least two."""


def samples(episodes: Episodes, *, talkative: bool = False) -> tuple[TrainingSample, ...]:
    """What a learner is given of these episodes."""
    return select_trainable([_group(compared, serial, talkative) for serial, compared in enumerate(episodes)], {}).samples


def _group(compared: Compared, serial: int, talkative: bool) -> Group:
    greedy = Attempted((Lived((), (1,), ((2, -1.0),)),), score=compared.greedy)
    return Group(
        serial,
        Task(f"task-{serial}", OPENING),
        tuple(_trajectory(one, serial, member, talkative) for member, one in enumerate(compared.attempts)),
        _trajectory(greedy, serial, len(compared.attempts), talkative),
    )


def _trajectory(attempted: Attempted, group: int, member: int, talkative: bool) -> Trajectory:
    return Trajectory(
        attempt=AttemptId("run", f"task-{group}", group, member),
        task_id=f"task-{group}",
        turns=_turns(attempted.turns, talkative),
        status=Status.OUT_OF_TURNS if attempted.truncated else Status.COMPLETED,
        truncated=attempted.truncated,
        rewards={"score": attempted.score, "style": attempted.style},
        start=OPENING,
    )


def _turns(lived: Sequence[Lived], talkative: bool) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            index=index,
            parent=None if one.back >= index else index - 1 - one.back,
            new_ids=(*(one.extra if talkative else ()), *one.seen),
            action_ids=tuple(token for token, _ in one.said),
            logprobs=tuple(logprob for _, logprob in one.said),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(""), ""),
            observation=(Message.tool(f"room {one.room}", "call"),),
            results=(ToolResult((), ok=True),) if one.tool else (),
            rewards={"step": one.reward},
            call_rewards=({"call": one.call_reward},),
            call_ends=(0,),
        )
        for index, one in enumerate(lived)
    )
