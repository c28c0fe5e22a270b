"""Reference solutions of a problem."""

from __future__ import annotations

import ast
from collections.abc import Callable

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, script, tool_call
from agent_r1.tasksets.code.exam import Exam
from agent_r1.tasksets.code.source import parse_source
from agent_r1.tasksets.code.tool import RUN_TESTS


def solutions_of(max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions.

    One of the wrong solutions calls a tool ``max_turns`` times and gives no answer.
    """

    def of(task: Task) -> ReferenceSolutions:
        exam: Exam = task.data["exam"]
        right: str = task.data["solution"]
        none = return_none(right, exam.calls)
        gold = (
            ReferenceSolution("its solution", script(code_message(right))),
            ReferenceSolution(
                "its solution, tried first", script(tool_call(RUN_TESTS, code=right), code_message(right))
            ),
            ReferenceSolution("fixed after a failure", script(tool_call(RUN_TESTS, code=none), code_message(right))),
        )
        wrong = (
            ReferenceSolution("return None", script(code_message(none))),
            ReferenceSolution("made worse", script(tool_call(RUN_TESTS, code=right), code_message(none))),
            ReferenceSolution("its solution, without a block", script(Message.assistant(right))),
            ReferenceSolution("a block that does not close", script(Message.assistant(f"```python\n{right}"))),
            ReferenceSolution("an empty block", script(code_message(""))),
            ReferenceSolution("nothing", script(Message.assistant(""))),
            ReferenceSolution("trying to the end", script(*(tool_call(RUN_TESTS, code=right),) * max_turns)),
        )
        return ReferenceSolutions(gold, wrong, {"passed": 1.0})

    return of


def code_message(source: str) -> Message:
    return Message.assistant(f"```python\n{source.strip()}\n```")


def return_none(source: str, names: tuple[str, ...]) -> str:
    """Return the source with ``return None`` as the body of each function in ``names``.

    Example:
        >>> return_none("def f(x):\\n    return x", ("f",))
        'def f(x):\\n    return None'
    """
    tree = parse_source(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(tree)
