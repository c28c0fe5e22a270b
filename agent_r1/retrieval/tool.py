"""The search tool of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.retrieval.retriever import TOP_K, Passage, RetrievalError, Retriever
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

NOTHING_FOUND = "No passage matches this query."


def search_tool(retriever: Retriever, k: int = TOP_K) -> Tool:
    """Return a search tool. A result shows at most ``k`` passages, and the titles of the passages are its ``data``.

    Waiting calls of different episodes are sent to the retriever as one batch. If the retriever fails, all calls of the
    batch fail.
    """

    def search_many(calls: list[dict[str, Any]]) -> list[ToolResult]:
        return _search(retriever, [call["query"] for call in calls], k)

    @tool(batch=search_many)
    def search(query: str) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return search_many([{"query": query}])[0]

    return search


def search_tool_with_question(retriever: Retriever, k: int = TOP_K) -> Tool:
    """Return a search tool that repeats the task's question at the end of each result.

    The question is the last message of the task. If a result does not end with the question, a small model often gives
    a wrong answer. Except for the question, the results are the results of :func:`search_tool`.
    """

    def search_many(calls: list[dict[str, Any]]) -> list[ToolResult]:
        results = _search(retriever, [call["query"] for call in calls], k)
        return [_with_question(result, call["task"]) for result, call in zip(results, calls, strict=True)]

    @tool(batch=search_many)
    def search(query: str, task: Task) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return search_many([{"query": query, "task": task}])[0]

    return search


def _search(retriever: Retriever, queries: list[str], k: int) -> list[ToolResult]:
    try:
        found = retriever.search(queries, k)
    except RetrievalError as error:
        return [error_result(ToolErrorKind.RAISED, f"search failed: {error}")] * len(queries)
    return [_result(passages) for passages in found]


def _with_question(result: ToolResult, task: Task) -> ToolResult:
    if not result.ok:
        return result
    return replace(result, parts=(*result.parts, Text(f"\n\n{task.messages[-1].text}")))


def _result(found: Sequence[Passage]) -> ToolResult:
    titles = tuple(passage.title for passage in found)
    return ToolResult((Text(render(found)),), ok=True, data=titles)


def render(passages: Sequence[Passage]) -> str:
    """Return the passages as numbered text, or ``NOTHING_FOUND`` if there are none.

    Example:
        >>> print(render([Passage("Alba", "A river."), Passage("Bruno", "A king.")]))
        [1] Alba
        A river.
        <BLANKLINE>
        [2] Bruno
        A king.
    """
    numbered = (f"[{number}] {passage.title}\n{passage.text}" for number, passage in enumerate(passages, start=1))
    return "\n\n".join(numbered) or NOTHING_FOUND
