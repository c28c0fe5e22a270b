"""Half of a surrogate pair cannot be tokenized: it is refused where it is given, and not in each episode."""

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, ToolCall
from agent_r1.core.task import Task
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.tools.function_tool import tool

HALF = "a\ud83d"


def described(text):
    def search(query: str = text) -> str:
        return query

    search.__doc__ = f"Search.\n\nArgs:\n    query: what {text}."
    return search


@pytest.mark.parametrize(
    "make",
    [
        lambda text: ToolEnv([], system=text),
        lambda text: ToolEnv([], examples=[Message.user(text)]),
        lambda text: ToolEnv([], examples=[Message.assistant("x", reasoning=text)]),
        lambda text: ToolEnv([], examples=[Message.assistant("", (ToolCall("c", "search", {"q": [text]}, ""),))]),
        lambda text: ToolEnv([described(text)]),
        lambda text: NaiveRag(tool(plain), system=text),
        lambda text: Task("t", [Message.user("x"), Message.assistant("x", reasoning=text)]),
        lambda text: Task("t", [Message.assistant("", (ToolCall("c", "search", {text: 1}, ""),))]),
    ],
)
def test_half_a_character_is_refused_at_once(make):
    make("whole 😀")
    with pytest.raises(InvalidInput, match=r"got half a character, '\\ud83d'; remove it"):
        make(HALF)


def plain(query: str) -> str:
    """Search."""
    return query


@pytest.mark.parametrize("system", [7, b"text"])
def test_a_system_message_that_is_no_text_is_refused(system):
    with pytest.raises(InvalidInput, match="give text"):
        ToolEnv([], system=system)
