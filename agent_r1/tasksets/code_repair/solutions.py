"""Reference solutions of the tasks of ``code-repair``: known right and wrong solutions, for checks of the task set."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script, tool_call
from agent_r1.tasksets.answers import answer
from agent_r1.tasksets.code_repair.bugs import Bug
from agent_r1.tasksets.code_repair.examples import TRY
from agent_r1.tasksets.code_repair.tool import bug_of


def solutions_of(max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions.

    ``max_turns`` is the maximum number of actions in an episode. One of the wrong solutions uses all these actions for
    tool calls, and gives no answer.
    """

    def of(task: Task) -> ReferenceSolutions:
        bug = bug_of(task)
        right, wrong = bug.repair, _unchanged(bug)
        gold = (
            ReferenceSolution("the right line", script(answer(right))),
            ReferenceSolution("the right line, tried first", script(tool_call(TRY, edit=right), answer(right))),
        )
        others = (
            ReferenceSolution("the line with the bug", script(answer(wrong))),
            ReferenceSolution("the right line, given up", script(tool_call(TRY, edit=right), answer(wrong))),
            ReferenceSolution("the right line, without tags", script(Message.assistant(right))),
            ReferenceSolution("the tests", script(answer(bug.problem.tests[-1]))),
            ReferenceSolution("an empty answer", script(answer(""))),
            ReferenceSolution("nothing", script(Message.assistant(""))),
            ReferenceSolution("trying to the end", script(*(tool_call(TRY, edit=right),) * max_turns)),
        )
        return ReferenceSolutions(gold, others, {"fixed": 1.0, "gained": 1.0})

    return of


def _unchanged(bug: Bug) -> str:
    """Return a wrong answer to the task.

    The agent answers with a line, or with the number of a proposed line. In the first case, the wrong answer is the
    line with the bug. In the second case, the wrong answer is a number that no proposal has.
    """
    return str(len(bug.proposals) + 1) if bug.proposals else bug.source.splitlines()[bug.line].strip()
