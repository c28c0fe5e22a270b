"""ReferenceSolutions: ways to act in a task that are known to be right or wrong, by which a world is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.core.errors import EngineError
from agent_r1.core.messages import Message, Text, ToolCall

Responder = Callable[[tuple[Message, ...], int], Message]
"""What the assistant says next, given the conversation so far and the number of its turn, from 0.

A game or a user answers differently every time, so a solution may look at what was said; :func:`script` does not.
"""


@dataclass(frozen=True, slots=True)
class ReferenceSolution:
    """One way to act in a task.

    Example:
        ReferenceSolution("gold answer", script(tool_call("search", query="Alba"), Message.assistant("<answer>Bruno</answer>")))
    """

    name: str
    act: Responder


@dataclass(frozen=True, slots=True)
class ReferenceSolutions:
    """The solutions of one task. Each of ``gold`` earns all of the rewards ``full``, each of ``wrong`` none of them.

    A reward that a wrong solution may earn too, such as one for a search that found something, does not belong into
    ``full``. A reward given per turn, or to turns and calls, is summed over the episode.

    Example:
        ReferenceSolutions(
            gold=(ReferenceSolution("answer", script(Message.assistant("<answer>Bruno</answer>"))),),
            wrong=(ReferenceSolution("no answer", script(Message.assistant("I do not know."))),),
            full={"em": 1.0},
        )
    """

    gold: tuple[ReferenceSolution, ...]
    wrong: tuple[ReferenceSolution, ...]
    full: Mapping[str, float]


def tool_call(name: str, **arguments: Any) -> Message:
    """The assistant calls one tool.

    Example:
        tool_call("search", query="Alba")
    """
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))


def script(*said: Message) -> Responder:
    """Say these, one per turn, whatever comes back. Raises EngineError where the episode goes on after the last."""

    def act(conversation: tuple[Message, ...], turn: int) -> Message:
        if turn >= len(said):
            raise EngineError(f"the script has {len(said)} turns, and the episode goes on after them")
        return said[turn]

    return act
