"""Solved examples for prompts: conversations in which an agent searches for pages, and then answers."""

from __future__ import annotations

from itertools import chain

from agent_r1.core.messages import Message
from agent_r1.core.taskset import tool_call
from agent_r1.retrieval.retriever import Passage
from agent_r1.retrieval.tool import render


def solved_example(question: str, answer: str, *pages: Passage) -> tuple[Message, ...]:
    """Return the messages of a solved example: the question, a search for each page, and the answer.

    Each search result repeats the question after the page.
    """
    searches = [
        (tool_call("search", query=page.title), Message.tool(f"{render([page])}\n\n{question}", "call_0"))
        for page in pages
    ]
    return (Message.user(question), *chain.from_iterable(searches), Message.assistant(f"<answer>{answer}</answer>"))
