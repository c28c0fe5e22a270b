"""Solutions: ways to act in a task that are known to be right or wrong, by which a world is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.core.errors import EngineError
from agent_r1.core.messages import Call, Message, Text

Act = Callable[[tuple[Message, ...], int], Message]
"""What the assistant says next, given the conversation so far and the number of its turn, from 0.

A game or a user answers differently every time, so a solution may look at what was said; :func:`script` does not.
"""


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to act in a task.

    Example:
        Solution("gold answer", script(calling("search", query="Alba"), Message.assistant("<answer>Bruno</answer>")))
    """

    name: str
    act: Act


@dataclass(frozen=True, slots=True)
class Solutions:
    """The solutions of one task. Each of ``gold`` earns all of the rewards ``full``, each of ``wrong`` none of them.

    A reward that a wrong solution may earn too, such as one for a search that found something, does not belong into
    ``full``. A reward given per turn, or to turns and calls, is summed over the episode.

    Example:
        Solutions(
            gold=(Solution("answer", script(Message.assistant("<answer>Bruno</answer>"))),),
            wrong=(Solution("no answer", script(Message.assistant("I do not know."))),),
            full={"em": 1.0},
        )
    """

    gold: tuple[Solution, ...]
    wrong: tuple[Solution, ...]
    full: Mapping[str, float]


def calling(name: str, **arguments: Any) -> Message:
    """The assistant calls one tool.

    Example:
        calling("search", query="Alba")
    """
    return Message("assistant", (Text(""),), (Call("call_0", name, arguments, ""),))


def script(*said: Message) -> Act:
    """Say these, one per turn, whatever comes back. Raises EngineError where the episode goes on after the last."""

    def act(conversation: tuple[Message, ...], turn: int) -> Message:
        if turn >= len(said):
            raise EngineError(f"the script has {len(said)} turns, and the episode goes on after them")
        return said[turn]

    return act
