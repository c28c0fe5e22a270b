"""Reference solutions of tasks whose answer is the text in ``<answer>...</answer>``."""

from __future__ import annotations

from collections.abc import Mapping

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script
from agent_r1.rewards.scoring import gold_answers


def answer(text: str, thought: str = "") -> Message:
    """Return the assistant's message ``<answer>text</answer>``, after a thought."""
    return Message.assistant(f"{thought}<answer>{text}</answer>")


def reference(name: str, *messages: Message) -> ReferenceSolution:
    """Return a reference solution that sends ``messages``, one per turn."""
    return ReferenceSolution(name, script(*messages))


def answer_solutions(
    task: Task,
    searches: tuple[Message, ...],
    other: str,
    max_turns: int,
    full: Mapping[str, float],
    thought: str = "",
) -> ReferenceSolutions:
    """Return right and wrong reference solutions of the question ``task``.

    Args:
        searches: messages with tool calls, fewer than ``max_turns``. One right and one wrong solution begin with these
            messages.
        other: a wrong answer, for example the answer of another task.
        full: for each reward, by name, the number that right solutions reach and wrong solutions do not.
        thought: the text before the answer that follows the searches.
    """
    first, *aliases = gold_answers(task)
    gold = (
        reference("the answer, after its searches", *searches, answer(first, thought)),
        reference("the answer", answer(first)),
        *(reference(f"its other name {alias!r}", answer(alias)) for alias in aliases),
    )
    wrong = (
        reference("another answer, after its searches", *searches, answer(other)),
        reference("the question", answer(task.messages[-1].text)),
        reference("an empty answer", answer("")),
        reference("no answer", Message.assistant("I do not know.")),
        reference("nothing", Message.assistant("")),
        reference("the answer, without its tags", Message.assistant(first)),
        reference("searches to the end", *searches[:1] * max_turns),
    )
    return ReferenceSolutions(gold, wrong, full)
