"""Reference solutions of tasks whose answer is the text in ``<answer>...</answer>``."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script
from agent_r1.rewards.scoring import gold_answers


def answer(text: str) -> Message:
    """Return the assistant's message ``<answer>text</answer>``."""
    return Message.assistant(f"<answer>{text}</answer>")


def answer_solutions(
    task: Task, searches: tuple[Message, ...], other: str, max_turns: int, full: Mapping[str, float]
) -> ReferenceSolutions:
    """Return right and wrong reference solutions of the question ``task``.

    Args:
        searches: messages with tool calls, fewer than ``max_turns``. One right and one wrong solution begin with these
            messages.
        other: a wrong answer, for example the answer of another task.
        full: a number for each reward, by name. The reward of each right solution must reach the number. The reward of
            each wrong solution must stay below the number.
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
