"""Parts that several task sets with a search share: solved examples for prompts, and rewards for the pages found."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import tool_call
from agent_r1.core.trajectory import Trajectory
from agent_r1.retrieval.retriever import Passage, render
from agent_r1.rewards.scoring import final_answer


def solved_example(question: str, answer: str, *pages: Passage) -> tuple[Message, ...]:
    """Return the messages of a solved example: the question, a search for each page, and the answer.

    Each search result repeats the question after the page.
    """
    searches = [
        (tool_call("search", query=page.title), Message.tool(f"{render([page])}\n\n{question}", "call_0"))
        for page in pages
    ]
    return (Message.user(question), *chain.from_iterable(searches), Message.assistant(f"<answer>{answer}</answer>"))


def page_rewards(needed: Callable[[Task], Collection[str]]) -> dict[str, Callable[[Trajectory, Task], float]]:
    """Return two reward functions by name. ``needed`` returns the titles of the pages that a task needs.

    - ``pages_read``: the share of the needed pages that the searches of an attempt found, from 0 to 1. The ``data`` of
      a search result must be the titles of its pages.
    - ``supported``: the same if the attempt gives an answer, right or wrong; else 0.
    """

    def pages_read(trajectory: Trajectory, task: Task) -> float:
        found = {title for turn in trajectory.env_turns for result in turn.results for title in result.data or ()}
        titles = set(needed(task))
        return len(found & titles) / len(titles)

    def supported(trajectory: Trajectory, task: Task) -> float:
        # Rewarded for searches alone, an agent would learn never to answer.
        return 0.0 if final_answer(trajectory) is None else pages_read(trajectory, task)

    return {"pages_read": pages_read, "supported": supported}
