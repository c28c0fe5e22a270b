"""The search tool of ``people``, and the reward for the pages that the searches returned."""

from __future__ import annotations

from functools import lru_cache

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.tool import ToolResult
from agent_r1.core.trajectory import Trajectory
from agent_r1.retrieval.bm25 import BM25Index
from agent_r1.retrieval.tool import render
from agent_r1.tasksets.pages import share_of_pages
from agent_r1.tasksets.people.questions import world_of
from agent_r1.tasksets.people.world import WorldKey, open_world
from agent_r1.tools import tool

TOP_K = 3


@lru_cache(maxsize=256)
def _index(world: WorldKey) -> BM25Index:
    return BM25Index(open_world(world).pages())


@tool
def search(query: str, task: Task) -> ToolResult:
    """Search pages about people. Returns the three that fit best.

    Args:
        query: the name of a person
    """
    (found,) = _index(world_of(task)).search([query], TOP_K)
    return ToolResult((Text(render(found)),), ok=True, data=tuple(passage.title for passage in found))


def pages_read(trajectory: Trajectory, task: Task) -> float:
    """Return the share of the pages of the question's chain that the searches of the attempt returned, in [0, 1]."""
    return share_of_pages(trajectory, task.data["chain"].pages)
