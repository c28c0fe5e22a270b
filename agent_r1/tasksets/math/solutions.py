"""Reference solutions of a problem."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script, tool_call
from agent_r1.tasksets.math.form import expressions, same_text
from agent_r1.tasksets.math.normalization import normalize_answer
from agent_r1.tasksets.math.problems import Problem


def solutions_of(problems: tuple[Problem, ...], max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions.

    One of the wrong solutions gives the answer to another problem in ``problems``, if an answer with different digits
    exists. Another of the wrong solutions calls a tool ``max_turns`` times, and gives no answer.
    """
    answers = list(dict.fromkeys(problem.answer for problem in problems))

    def of(task: Task) -> ReferenceSolutions:
        gold: str = task.data["answer"]
        other = next((each for each in answers if have_different_digits(each, gold)), f"{gold} + 2")
        computing = tool_call("python", code="print(6 * 7)")
        right = (
            ReferenceSolution("the answer", script(boxed_message(gold))),
            ReferenceSolution("the answer, after computing", script(computing, boxed_message(gold))),
            ReferenceSolution(
                "the last of two answers",
                script(Message.assistant(f"{boxed_message(other).text} No: {boxed_message(gold).text}")),
            ),
        )
        wrong = (
            ReferenceSolution("another answer, after computing", script(computing, boxed_message(other))),
            *(ReferenceSolution("one more", script(boxed_message(more))) for more in plus_one(gold)),
            ReferenceSolution("not added up", script(boxed_message(uncomputed_sum(gold)))),
            *(
                ReferenceSolution("copied", script(boxed_message(copy)))
                for copy in copied_expressions(task.messages[-1].text, gold)
            ),
            ReferenceSolution("an empty box", script(boxed_message(""))),
            ReferenceSolution("the answer, without a box", script(Message.assistant(gold))),
            ReferenceSolution("a box that does not close", script(Message.assistant(rf"\boxed{{{gold}"))),
            ReferenceSolution("nothing", script(Message.assistant(""))),
            ReferenceSolution("computing to the end", script(*(computing,) * max_turns)),
        )
        return ReferenceSolutions(right, wrong, {"correct": 1.0})

    return of


def boxed_message(answer: str) -> Message:
    return Message.assistant(rf"The answer is \boxed{{{answer}}}.")


def plus_one(answer: str) -> tuple[str, ...]:
    r"""Return a tuple with one text, the answer plus one; () if the answer contains infinity.

    If the answer is an integer, the sum is computed. Otherwise, "+ 1" is written after the answer.

    Example:
        >>> plus_one("1,999"), plus_one(r"\frac{1}{2}"), plus_one(r"\infty")
        (('2000',), ('\\frac{1}{2} + 1',), ())
    """
    try:
        return (str(int(answer.replace(",", "")) + 1),)
    except ValueError:
        return () if r"\infty" in answer else (f"{answer} + 1",)


def uncomputed_sum(answer: str) -> str:
    """Return an integer answer as a sum that is not computed. Return ``1 + 1 + 1`` for any other answer.

    Example:
        >>> uncomputed_sum("18")
        '17 + 1'
    """
    try:
        return f"{int(answer.replace(',', '')) - 1} + 1"
    except ValueError:
        return "1 + 1 + 1"


def copied_expressions(question: str, gold: str) -> tuple[str, ...]:
    """Return the mathematical expressions of a question, except expressions with the same text as the gold answer."""
    return tuple(
        each for each in expressions(question) if not same_text(normalize_answer(gold), normalize_answer(each))
    )


def have_different_digits(one: str, other: str) -> bool:
    """Return whether two answers differ after all characters except digits are removed.

    The result is True for ``x=5`` and ``6``, and False for ``x=5`` and ``5``.
    """
    return "".join(filter(str.isdigit, one)) != "".join(filter(str.isdigit, other))
