"""The prompt of ``people``: the instruction and a solved question. No world contains the people of this question."""

from __future__ import annotations

from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import tool_call
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.tool import render

INSTRUCTION = "Search for one person at a time. When you know the answer, reply with <answer>answer</answer>."
READING = "Read the pages and reply with <answer>answer</answer>."

_ROSE = Passage("Rose Okafor", "Rose Okafor had a rival, Ivan Petrov. She spoke Dutch. She kept a cat.")
_ROSS = Passage("Ross Okafor", "Ross Okafor was born in Oslo. His employer was Ida Lund.")
_IVAN = Passage("Ivan Petrov", "Ivan Petrov played the piano. He was born in Cairo. His teacher was Ross Okafor.")
_VERA = Passage("Vera Petrov", "Vera Petrov worked as a nurse. Her best friend was Ida Lund.")
_QUESTION = Message.user("Where was the rival of Rose Okafor born?")


def _result(*pages: Passage) -> Message:
    return Message.tool(render(pages), "call_0")


EXAMPLES: tuple[Message, ...] = (
    _QUESTION,
    tool_call("search", query="Rose Okafor"),
    _result(_ROSE, _ROSS),
    tool_call("search", query="Ivan Petrov"),
    _result(_IVAN, _VERA),
    Message.assistant("<answer>Cairo</answer>"),
)
"""A solved question of two hops."""

READING_EXAMPLES: tuple[Message, ...] = (
    Message.user(f"{render((_IVAN, _VERA))}\n\nWhere was Ivan Petrov born?"),
    Message.assistant("<answer>Cairo</answer>"),
)
"""The example for the naive RAG baseline, which gets the pages in its prompt and does not search."""
