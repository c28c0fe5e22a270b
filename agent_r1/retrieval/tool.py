"""The search tool of an agent, over any retriever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1.core.messages import Text
from agent_r1.core.tool import ToolResult
from agent_r1.retrieval.passages import Passage
from agent_r1.retrieval.retriever import TOP_K, Retriever, RetrievalError
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import Fault, failed

NOTHING_FOUND = "No passage matches this query."


def search_tool(retriever: Retriever, k: int = TOP_K) -> Tool:
    """A tool that searches with ``retriever`` and shows ``k`` passages; its results' ``data`` are their titles.

    Calls that wait at the same time, across episodes, become one search of many queries. Where the retriever
    fails, each of them is told so: an agent loses its turn, and no call is tried again one by one.
    """

    def search_many(calls: list[dict[str, Any]]) -> list[ToolResult]:
        try:
            found = retriever.search([call["query"] for call in calls], k)
        except RetrievalError as error:
            return [failed(Fault.RAISED, f"search failed: {error}")] * len(calls)
        return [_result(passages) for passages in found]

    @tool(batch=search_many)
    def search(query: str) -> ToolResult:
        """Search an encyclopedia. Returns the passages that match the query best.

        Args:
            query: what to look for, in a few words.
        """
        return search_many([{"query": query}])[0]

    return search


def _result(found: Sequence[Passage]) -> ToolResult:
    titles = tuple(passage.title for passage in found)
    return ToolResult((Text(render(found)),), ok=True, data=titles)


def render(passages: Sequence[Passage]) -> str:
    """The passages as an agent reads them.

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
