"""Mathematics: problems with one right answer (GSM8K, MATH), and a Python tool for the computations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent_r1.core.errors import require_extra
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolution, ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import DEFAULT_LEVEL, SandboxConfig, SandboxLevel
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.answers import reference
from agent_r1.tasksets.files import GIVEN_OUT, all_questions, read_splits, tasks_function, whole_split
from agent_r1.tasksets.math.notation import expressions, normalize_answer, same_text
from agent_r1.tasksets.math.problems import Problem, boxed_answer, read_problems
from agent_r1.tasksets.math.programs import program_of, without_marks
from agent_r1.tasksets.math.scorer import AnswerChecker, MathScorer
from agent_r1.tools.python_tool import python_tool

MAX_TURNS = 5

_BOX = "Give the final answer, and nothing else in the box, as \\boxed{answer}."
SYSTEM = f"Solve the problem. Think it through; where computing helps, run Python code with the tool. {_BOX}"
WITHOUT_TOOL = f"Solve the problem. Think it through. {_BOX}"


def build(data: Path, seed: int, sandbox: SandboxLevel = DEFAULT_LEVEL) -> TaskSet:
    """Build the task set of the problems in ``data`` (see :func:`agent_r1.tasksets.build`).

    Raises InvalidInput if an argument cannot be used, or if math-verify is not installed.
    """
    require_extra("math_verify", extra="math")
    splits = read_splits(data, seed, read_problems, GIVEN_OUT)
    confined = Sandbox(SandboxConfig(level=sandbox))
    return TaskSet(
        name="math",
        env=ToolEnv([python_tool(confined)], max_turns=MAX_TURNS, system=SYSTEM),
        tasks=tasks_function(splits, data),
        scorers=(MathScorer(AnswerChecker()),),
        baselines={"no-tool": ToolEnv([], max_turns=1, system=WITHOUT_TOOL)},
        rewards=("correct", "form"),
        recipe={"sandbox": sandbox, "reward_weights": {"correct": 1.0, "form": 0.0}},
        validation="validation" if splits["validation"] else None,
        whole=whole_split(splits),
        solutions=solutions_of(all_questions(splits), MAX_TURNS),
        sandbox=confined.isolation,
    )


def solutions_of(problems: tuple[Problem, ...], max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions.

    The first right solution is the one to imitate: a program of the computations that GSM8K marks, or else the worked
    solution, if the problem has one.
    One of the wrong solutions gives the answer to another problem in ``problems``, if an answer with different digits
    exists. Another calls a tool ``max_turns`` times, and gives no answer.
    """
    answers = list(dict.fromkeys(problem.answer for problem in problems))

    def of(task: Task) -> ReferenceSolutions:
        gold: str = task.data["answer"]
        # Different digits: "x=5" and "5" may be the same answer.
        other = next((each for each in answers if _digits(each) != _digits(gold)), f"{gold} + 2")
        computing = tool_call("python", code="print(6 * 7)")
        both = Message.assistant(f"{boxed_message(other).text} No: {boxed_message(gold).text}")
        right = (
            *worked_solution(task.messages[-1].text, task.data["worked"], gold),
            reference("the answer", boxed_message(gold)),
            reference("the answer, after computing", computing, boxed_message(gold)),
            reference("the last of two answers", both),
        )
        refused = [
            *(("one more", text) for text in plus_one(gold)),
            ("not added up", uncomputed_sum(gold)),
            *(("copied", text) for text in copied_expressions(task.messages[-1].text, gold)),
            ("an empty box", ""),
        ]
        wrong = (
            reference("another answer, after computing", computing, boxed_message(other)),
            *(reference(name, boxed_message(text)) for name, text in refused),
            reference("the answer, without a box", Message.assistant(gold)),
            reference("a box that does not close", Message.assistant(rf"\boxed{{{gold}")),
            reference("nothing", Message.assistant("")),
            reference("computing to the end", *(computing,) * max_turns),
        )
        return ReferenceSolutions(right, wrong, {"correct": 1.0})

    return of


def worked_solution(question: str, worked: str, answer: str) -> tuple[ReferenceSolution, ...]:
    """Return the solution that works the problem out, or () if the problem's row has only the answer."""
    program = program_of(question, worked, answer)
    if program is not None:
        return (reference("computed by a program", tool_call("python", code=program), boxed_message(answer)),)
    text = without_marks(worked)
    if not text or text == answer:
        return ()
    boxed = boxed_answer(text) is not None
    return (reference("worked out", Message.assistant(text if boxed else f"{text} {boxed_message(answer).text}")),)


def boxed_message(answer: str) -> Message:
    return Message.assistant(rf"The answer is \boxed{{{answer}}}.")


def plus_one(answer: str) -> tuple[str, ...]:
    r"""Return a tuple with one text, the answer plus one; () if the answer contains infinity.

    Example:
        >>> plus_one("1,999"), plus_one(r"\frac{1}{2}"), plus_one(r"\infty")
        (('2000',), ('\\frac{1}{2} + 1',), ())
    """
    try:
        return (str(int(answer.replace(",", "")) + 1),)
    except ValueError:
        return () if r"\infty" in answer else (f"{answer} + 1",)


def uncomputed_sum(answer: str) -> str:
    """Return an integer answer as a sum that is not computed ("17 + 1" for "18"), and "1 + 1 + 1" for any other."""
    try:
        return f"{int(answer.replace(',', '')) - 1} + 1"
    except ValueError:
        return "1 + 1 + 1"


def copied_expressions(question: str, gold: str) -> tuple[str, ...]:
    """Return the mathematical expressions of a question, except expressions with the same text as the gold answer."""
    return tuple(
        each for each in expressions(question) if not same_text(normalize_answer(gold), normalize_answer(each))
    )


def _digits(answer: str) -> str:
    return "".join(filter(str.isdigit, answer))
