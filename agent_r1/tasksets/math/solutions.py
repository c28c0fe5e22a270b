"""Right and wrong ways to act in a problem, by which the world is checked."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import ReferenceSolution, ReferenceSolutions, script, tool_call
from agent_r1.core.task import Task
from agent_r1.tasksets.math.form import expressions, same_text
from agent_r1.tasksets.math.normal import normal
from agent_r1.tasksets.math.problems import Problem


def solutions_of(problems: tuple[Problem, ...], max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """The gold answer in its forms; wrong are the answer of another problem, one more, what the question says already,
    a sum that is not added up, and answers out of form."""
    answers = list(dict.fromkeys(problem.answer for problem in problems))

    def of(task: Task) -> ReferenceSolutions:
        gold: str = task.data["answer"]
        other = next((each for each in answers if are_apart(each, gold)), f"{gold} + 2")
        computing = tool_call("python", code="print(6 * 7)")
        right = (
            ReferenceSolution("the answer", script(boxed(gold))),
            ReferenceSolution("the answer, after computing", script(computing, boxed(gold))),
            ReferenceSolution(
                "the last of two answers", script(Message.assistant(f"{boxed(other).text} No: {boxed(gold).text}"))
            ),
        )
        wrong = (
            ReferenceSolution("another answer, after computing", script(computing, boxed(other))),
            *(ReferenceSolution("one more", script(boxed(more))) for more in one_more(gold)),
            ReferenceSolution("not added up", script(boxed(not_added_up(gold)))),
            *(ReferenceSolution("copied", script(boxed(copy))) for copy in copies(task.messages[-1].text, gold)),
            ReferenceSolution("an empty box", script(boxed(""))),
            ReferenceSolution("the answer, without a box", script(Message.assistant(gold))),
            ReferenceSolution("a box that does not close", script(Message.assistant(rf"\boxed{{{gold}"))),
            ReferenceSolution("nothing", script(Message.assistant(""))),
            ReferenceSolution("computing to the end", script(*(computing,) * max_turns)),
        )
        return ReferenceSolutions(right, wrong, {"correct": 1.0})

    return of


def boxed(answer: str) -> Message:
    """The assistant's last word."""
    return Message.assistant(rf"The answer is \boxed{{{answer}}}.")


def one_more(answer: str) -> tuple[str, ...]:
    r"""The answer and one: of an integer its sum, of any other mathematics the sum as written; infinity has none.

    Example:
        >>> one_more("1,999"), one_more(r"\frac{1}{2}"), one_more(r"\infty")
        (('2000',), ('\\frac{1}{2} + 1',), ())
    """
    try:
        return (str(int(answer.replace(",", "")) + 1),)
    except ValueError:
        return () if r"\infty" in answer else (f"{answer} + 1",)


def not_added_up(answer: str) -> str:
    """An integer as a sum, which is its value and no answer; of any other answer a sum of something else.

    Example:
        >>> not_added_up("18")
        '17 + 1'
    """
    try:
        return f"{int(answer.replace(',', '')) - 1} + 1"
    except ValueError:
        return "1 + 1 + 1"


def copies(question: str, gold: str) -> tuple[str, ...]:
    """The expressions of a question, but for those that read as the answer does."""
    return tuple(each for each in expressions(question) if not same_text(normal(gold), normal(each)))


def are_apart(one: str, other: str) -> bool:
    """Whether two answers have other digits; those that differ otherwise may mean the same, as ``x=5`` and ``5`` do."""
    return "".join(filter(str.isdigit, one)) != "".join(filter(str.isdigit, other))
