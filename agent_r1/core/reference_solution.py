"""Reference solutions: known right and wrong ways to solve a task, used to check a task set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.core.errors import EngineError
from agent_r1.core.messages import Message, Text, ToolCall

Responder = Callable[[tuple[Message, ...], int], Message]
"""A function (conversation so far, index of the turn) -> next message of the assistant. The first turn has index 0."""


@dataclass(frozen=True, slots=True)
class ReferenceSolution:
    """One way to solve a task, right or wrong. The messages come from ``respond``, and not from the policy.

    Example:
        ReferenceSolution(name="guess", respond=script(tool_call("search", query="Alba"), Message.assistant("Bruno")))
    """

    name: str
    respond: Responder


@dataclass(frozen=True, slots=True)
class ReferenceSolutions:
    """The reference solutions of one task, for ``agent-r1 check``.

    Attributes:
        gold: right solutions. Each must reach every number in ``expected_rewards``.
        wrong: wrong solutions. Each must stay below every number in ``expected_rewards``.
        expected_rewards: a number for each reward, by name. The sum of the reward over an episode is compared with this
            number. Leave out rewards that a wrong solution can also earn, such as a reward for any search.

    Example:
        ReferenceSolutions(
            gold=(ReferenceSolution("answer", script(Message.assistant("<answer>Bruno</answer>"))),),
            wrong=(ReferenceSolution("no answer", script(Message.assistant("I do not know."))),),
            expected_rewards={"em": 1.0},
        )
    """

    gold: tuple[ReferenceSolution, ...]
    wrong: tuple[ReferenceSolution, ...]
    expected_rewards: Mapping[str, float]


def tool_call(name: str, **arguments: Any) -> Message:
    """Return an assistant message with one tool call: ``tool_call("search", query="Alba")``."""
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))


def script(*messages: Message) -> Responder:
    """Return a responder that sends ``messages``, one per turn, whatever the conversation is.

    The responder raises EngineError if the episode goes on after the last message.
    """

    def respond(conversation: tuple[Message, ...], turn: int) -> Message:
        if turn >= len(messages):
            raise EngineError(f"the script has {len(messages)} turns, and the episode goes on after them")
        return messages[turn]

    return respond
