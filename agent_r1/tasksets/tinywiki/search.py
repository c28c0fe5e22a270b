"""The search tool of TinyWiki, and the process reward of a search call. A search returns at most one page."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent_r1.core.messages import Text, ToolCall, ToolResult
from agent_r1.core.task import Task
from agent_r1.tasksets.tinywiki.wiki import Wiki, open_wiki
from agent_r1.tools.function_tool import tool

NOTHING = "No page."


def first_title(wiki: Wiki, query: str) -> str | None:
    return next((word for word in re.findall(r"\w+", query) if word in wiki.facts), None)


def retrieve(wiki: Wiki, query: str) -> str:
    """Return the text of the page of the first title in the query; ``NOTHING`` if there is no title.

    Example:
        retrieve(wiki, "mayor of Alba or Bruno") == wiki.page("Alba")
    """
    title = first_title(wiki, query)
    return NOTHING if title is None else wiki.page(title)


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
