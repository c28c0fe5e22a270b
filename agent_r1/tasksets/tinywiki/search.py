"""The search tool of TinyWiki, and the process reward of a search call."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.messages import Text, ToolCall
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.tasksets.tinywiki.retriever import NOTHING, retrieve
from agent_r1.tasksets.tinywiki.wiki import open_wiki
from agent_r1.tools import tool


@tool
async def search(query: str, task: Task) -> str:
    """Find a page.

    Args:
        query: what to find
    """
    return retrieve(open_wiki(task.data["wiki"]), query)


def found_page(call: ToolCall, result: ToolResult) -> Mapping[str, float]:
    """Return the process reward ``found``: 1.0 if the search returned a page, else 0.0."""
    return {"found": float(result.ok and result.parts != (Text(NOTHING),))}
