"""ReferenceSolutions of tasks whose scorers read an ``<answer>`` and compare it with the gold ones."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import ReferenceSolution, ReferenceSolutions, script
from agent_r1.core.task import Task
from agent_r1.rewards.answers import gold_answers


def answer(text: str) -> Message:
    """The assistant's last word."""
    return Message.assistant(f"<answer>{text}</answer>")


def answer_solutions(
    task: Task, searches: tuple[Message, ...], other: str, max_turns: int, full: Mapping[str, float]
) -> ReferenceSolutions:
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
        ReferenceSolution("the answer, after its searches", script(*searches, answer(first))),
        ReferenceSolution("the answer", script(answer(first))),
        *(ReferenceSolution(f"its other name {alias!r}", script(answer(alias))) for alias in aliases),
    )
    wrong = (
        ReferenceSolution("another answer, after its searches", script(*searches, answer(other))),
        ReferenceSolution("the question", script(answer(task.messages[-1].text))),
        ReferenceSolution("an empty answer", script(answer(""))),
        ReferenceSolution("no answer", script(Message.assistant("I do not know."))),
        ReferenceSolution("nothing", script(Message.assistant(""))),
        ReferenceSolution("the answer, without its tags", script(Message.assistant(first))),
        ReferenceSolution("searches to the end", script(*searches[:1] * max_turns)),
    )
    return ReferenceSolutions(gold, wrong, full)
