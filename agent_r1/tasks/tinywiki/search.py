"""The search tool of TinyWiki."""

from __future__ import annotations

from agent_r1.core.task import Task
from agent_r1.env import tool
from agent_r1.tasks.tinywiki.retriever import retrieve
from agent_r1.tasks.tinywiki.wiki import open_wiki


@tool
async def search(query: str, task: Task) -> str:
    """Find a page.

    Args:
        query: what to find
    """
    return retrieve(open_wiki(task.data["wiki"]), query)
