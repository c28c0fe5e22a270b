"""The search tools of the task set ``people``, and the rewards for the pages that the searches found."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agent_r1.core.messages import Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.retrieval.retriever import BM25Index, Passage
from agent_r1.retrieval.tool import render
from agent_r1.rewards.scoring import final_answer
from agent_r1.tasksets.pages import share_of_pages
from agent_r1.tasksets.people.questions import world_of
from agent_r1.tasksets.people.world import WorldKey, open_world
from agent_r1.tools.function_tool import Tool, tool


@lru_cache(maxsize=256)
def _index(world: WorldKey) -> BM25Index:
    return BM25Index(open_world(world).pages())


def search_tool(pages: int, name: str = "search") -> Tool:
    """Return the search tool of an agent. A call returns at most ``pages`` pages, followed by the question of the task.

    Without the question at the end, a small model often answers with the wrong value from the pages.
    """

    @tool(name=name)
    def search(query: str, task: Task) -> ToolResult:
        """Search pages about people. Returns the pages that fit best.

        Args:
            query: the name of a person
        """
        found = _find(query, task, pages)
        return _result(found, f"{render(found)}\n\n{task.messages[-1].text}")

    return search


def retrieval_tool(pages: int) -> Tool:
    """Return the search tool of naive RAG, a baseline that searches once and then answers.

    A call returns at most ``pages`` pages. Unlike the tool of :func:`search_tool`, this tool does not add the question
    of the task after the pages.
    """

    @tool
    def search(query: str, task: Task) -> ToolResult:
        """Search pages about people.

        Args:
            query: the text of a question
        """
        found = _find(query, task, pages)
        return _result(found, render(found))

    return search


def _find(query: str, task: Task, pages: int) -> Sequence[Passage]:
    (found,) = _index(world_of(task)).search([query], pages)
    return found


def _result(found: Sequence[Passage], text: str) -> ToolResult:
    return ToolResult((Text(text),), ok=True, data=tuple(passage.title for passage in found))


def pages_read(trajectory: Trajectory, task: Task) -> float:
    """Return the share of the needed pages that the searches of an attempt found, from 0 to 1.

    The needed pages are the pages with the facts that the question needs.
    """
    return share_of_pages(trajectory, task.data["chain"].pages)


def supported(trajectory: Trajectory, task: Task) -> float:
    """Return :func:`pages_read` if the attempt gives an answer, right or wrong; else 0.0.

    If the answer were not necessary, an agent would be rewarded for searches alone, and would learn never to answer.
    """
    return 0.0 if final_answer(trajectory) is None else pages_read(trajectory, task)
