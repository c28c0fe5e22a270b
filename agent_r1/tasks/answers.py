"""Solutions of tasks whose scorers read an ``<answer>`` and compare it with the gold ones."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.messages import Message
from agent_r1.core.solution import Solution, Solutions, script
from agent_r1.core.task import Task
from agent_r1.env.rewards import gold_answers


def answer(text: str) -> Message:
    """The assistant's last word."""
    return Message.assistant(f"<answer>{text}</answer>")


def answer_solutions(
    task: Task, searches: tuple[Message, ...], other: str, max_turns: int, full: Mapping[str, float]
) -> Solutions:
    """The solutions of a question.

    Args:
        task: the question; its ``data["answers"]`` are all right.
        searches: tool calls on the way to the answer, one per turn, fewer than ``max_turns``.
        other: an answer that is wrong, as that of another task.
        max_turns: after so many calls the episode is over.
        full: what a right answer earns and a wrong one does not, by reward.
    """
    first, *aliases = gold_answers(task)
    gold = (
        Solution("the answer, after its searches", script(*searches, answer(first))),
        Solution("the answer", script(answer(first))),
        *(Solution(f"its other name {alias!r}", script(answer(alias))) for alias in aliases),
    )
    wrong = (
        Solution("another answer, after its searches", script(*searches, answer(other))),
        Solution("the question", script(answer(task.messages[-1].text))),
        Solution("an empty answer", script(answer(""))),
        Solution("no answer", script(Message.assistant("I do not know."))),
        Solution("nothing", script(Message.assistant(""))),
        Solution("the answer, without its tags", script(Message.assistant(first))),
        Solution("searches to the end", script(*searches[:1] * max_turns)),
    )
    return Solutions(gold, wrong, full)
