"""Code: the agent writes a function (HumanEval, MBPP) and tries it on public examples. Hidden tests grade it."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

from agent_r1.core.messages import Message, Text, ToolResult
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import Rewards, Trajectory, Turn
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rewards.scoring import calls_are_valid, final_text
from agent_r1.sandbox.config import DEFAULT_LEVEL, SandboxConfig, SandboxLevel
from agent_r1.sandbox.process import ExecutionResult, ExecutionStatus, Verdict
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.answers import reference
from agent_r1.tasksets.code.problems import Exam, packages_for, read_problems
from agent_r1.tasksets.code.source import Example, parse_source
from agent_r1.tasksets.files import GIVEN_OUT, all_questions, read_splits, tasks_function, whole_split
from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.tool_errors import ToolErrorKind, error_result

_log = logging.getLogger(__name__)

MAX_TURNS = 5

SYSTEM = (
    "Write a Python function. Try your solution with the run_tests tool, which runs it on the examples that you see; "
    "mend what is wrong, and try again. There are further tests that you do not see. "
    "When it is right, give the whole solution, and nothing else, in a ```python block."
)


def build(data: Path, seed: int, sandbox: SandboxLevel = DEFAULT_LEVEL) -> TaskSet:
    """Build the task set of the problems in ``data`` (see :func:`agent_r1.tasksets.build`).

    Raises InvalidInput if an argument cannot be used, or if the tests need a package that is not installed.
    """
    splits = read_splits(data, seed, read_problems, GIVEN_OUT)
    confined = Sandbox(SandboxConfig(level=sandbox, packages=packages_for(p.exam for p in all_questions(splits))))
    return TaskSet(
        name="code",
        env=ToolEnv([run_tests_tool(confined)], max_turns=MAX_TURNS, system=SYSTEM),
        tasks=tasks_function(splits, data),
        scorers=(CodeScorer(confined),),
        rewards=("passed", "form", "first_passed"),
        recipe={"sandbox": sandbox, "reward_weights": {"passed": 1.0, "form": 0.0, "first_passed": 0.0}},
        validation="validation" if splits["validation"] else None,
        whole=whole_split(splits),
        solutions=solutions_of(MAX_TURNS),
        measures=repair_rates,
        sandbox=confined.isolation,
    )


RUN_TESTS = "run_tests"

_TRIAL = (Path(__file__).parent / "trial.py").read_text("utf-8")
WAIT = 600.0
"""Seconds that a call can wait for a free slot of the sandbox."""


def run_tests_tool(sandbox: Sandbox) -> Tool:
    """Return the tool ``run_tests``. The ``data`` of a tool result is an :class:`ExecutionResult`.

    The text of a result must not decide a reward, because the solution can print any text.
    """

    @tool(name=RUN_TESTS, timeout=sandbox.config.limits.seconds + WAIT, sandbox=sandbox)
    async def run_tests(code: str, task: Task) -> ToolResult:
        """Run a solution on the examples of the task; see what it prints, what it raises, and what it gets wrong.

        Args:
            code: the whole solution, as Python source.
        """
        exam: Exam = task.data["exam"]
        return format_trial(await sandbox.run(trial_program(code, exam, task.data["examples"])))

    return run_tests


def trial_program(code: str, exam: Exam, examples: Sequence[Example]) -> str:
    """Return the source of a program that runs the solution ``code`` on the examples and prints the failures."""
    pairs = [(example.call, example.wanted) for example in examples]
    before = exam.given or exam.setup  # imports and helper functions for the examples, without tests
    return f"{_TRIAL}\ntry_out({before!r}, {code!r}, {exam.after!r}, {pairs!r})"


def format_trial(outcome: ExecutionResult) -> ToolResult:
    """Convert the outcome of a :func:`trial_program` to a tool result. A wrong solution is not an error of the tool."""
    text = outcome.stdout.text + outcome.stderr.text
    if outcome.ok:
        return ToolResult((Text(text),), ok=True, data=outcome)
    fault = ToolErrorKind.TIMED_OUT if outcome.status is ExecutionStatus.TIMED_OUT else ToolErrorKind.RAISED
    told = error_result(fault, f"{text}[{outcome.status}: {outcome.error.strip()}]")
    return ToolResult(told.parts, ok=False, error=told.error, data=outcome)


_OPENER = re.compile(r"^(?P<before>[ \t]*|.*</think>[ \t]*)```(?i:python3?|py)[ \t]*\n", re.MULTILINE)
_CLOSER = re.compile(r"^[ \t]*```(?![`\w])", re.MULTILINE)


class CodeScorer:
    """A scorer with three rewards.

    - ``passed``: 1 if the final solution passes the hidden tests; 0 if it fails or is missing; None if it could not be
      graded.
    - ``form``: 1 if the last action contains a solution, right or wrong, and every call was valid; else 0.
    - ``first_passed``: like ``passed``, for the first code that was given to ``run_tests``. Without such code, the
      value of ``passed``.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.sandbox = sandbox.isolation

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        exam: Exam = task.data["exam"]
        codes = {code for trajectory in group for code in (first_code(trajectory), final_code(trajectory))}
        different = sorted(code for code in codes if code is not None)
        verdicts = await asyncio.gather(*(exam.judge(self._sandbox, code) for code in different))
        judged = dict(zip(different, verdicts, strict=True))
        for verdict in verdicts:
            if verdict.passed is None:
                _log.warning("a solution of %s could not be judged: %s", task.id, verdict.reason)
        return tuple(_rewards(trajectory, judged) for trajectory in group)


def extract_solution(text: str) -> str | None:
    """Return the content of the last complete ```` ```python ```` block; None if the block is missing or blank.

    Each fence must begin a line, and can be indented.
    """
    text = text.replace("\r\n", "\n")
    blocks = [block for opener in _OPENER.finditer(text) if (block := _closed(text, opener.end())) is not None]
    return dedent(blocks[-1]) if blocks and blocks[-1].strip() else None


def _closed(text: str, start: int) -> str | None:
    closer, opener = _CLOSER.search(text, start), _OPENER.search(text, start)
    if closer is None or (opener is not None and opener.start() < closer.start()):
        return None
    return text[start : closer.start()]


def final_code(trajectory: Trajectory) -> str | None:
    """Return the solution in the last action; None if the last action has no solution or calls a tool."""
    text = final_text(trajectory)
    return None if text is None else extract_solution(text)


def first_code(trajectory: Trajectory) -> str | None:
    """Return the code of the first call of ``run_tests`` or, without a call, the final solution; None without both."""
    return next(iter(submitted_codes(trajectory)), None)


def submitted_codes(trajectory: Trajectory) -> tuple[str, ...]:
    """Return every code that ``run_tests`` ran, and then the final solution, if there is one."""
    tried = tuple(code for turn in trajectory.turns for code in _tried(turn))
    final = final_code(trajectory)
    return tried if final is None else (*tried, final)


def repair_rates(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return how often the first code of an attempt passed, and how often failed code was repaired.

    - ``first_pass_rate``: of all attempts, the share whose first code passed.
    - ``no_second_try_rate``: of the attempts whose first code failed, the share without a second code.
    - ``fix_rate``: of the attempts with a second code after a failed first code, the share whose final solution passed.

    Attempts that could not be graded are ignored. A rate without attempts is left out.
    """
    graded = ((t, t.rewards.get("passed"), t.rewards.get("first_passed")) for t in trajectories)
    judged = [(t, passed, first) for t, passed, first in graded if passed is not None and first is not None]
    failed = [(t, passed) for t, passed, first in judged if first == 0]
    again = [passed for t, passed in failed if len(submitted_codes(t)) > 1]
    rates = {"first_pass_rate": (len(judged) - len(failed)) / len(judged)} if judged else {}
    rates |= {"no_second_try_rate": (len(failed) - len(again)) / len(failed)} if failed else {}
    return rates | ({"fix_rate": again.count(1) / len(again)} if again else {})


def _tried(turn: Turn) -> list[str]:
    calls = zip(turn.action.message.calls, turn.results, strict=False)  # calls of the last turn are not run
    given = [(call.arguments or {}).get("code") for call, _ in calls if call.name == RUN_TESTS]
    return [code for code in given if isinstance(code, str)]


def _rewards(trajectory: Trajectory, judged: Mapping[str, Verdict]) -> Rewards:
    first, final = first_code(trajectory), final_code(trajectory)
    return {
        "passed": _mark(final, judged),
        "form": float(final is not None and calls_are_valid(trajectory)),
        "first_passed": _mark(first, judged),
    }


def _mark(code: str | None, judged: Mapping[str, Verdict]) -> float | None:
    if code is None:
        return 0.0
    passed = judged[code].passed
    return None if passed is None else float(passed)


def solutions_of(max_turns: int) -> Callable[[Task], ReferenceSolutions]:
    """Return a function that takes a task and returns its reference solutions: known right and wrong solutions."""

    def of(task: Task) -> ReferenceSolutions:
        exam: Exam = task.data["exam"]
        right: str = task.data["solution"]
        none = return_none(right, exam.calls)
        gold = (
            reference("its solution", code_message(right)),
            reference("its solution, tried first", tool_call(RUN_TESTS, code=right), code_message(right)),
            reference("fixed after a failure", tool_call(RUN_TESTS, code=none), code_message(right)),
        )
        wrong = (
            reference("return None", code_message(none)),
            reference("made worse", tool_call(RUN_TESTS, code=right), code_message(none)),
            reference("its solution, without a block", Message.assistant(right)),
            reference("a block that does not close", Message.assistant(f"```python\n{right}")),
            reference("an empty block", code_message("")),
            reference("nothing", Message.assistant("")),
            reference("trying to the end", *(tool_call(RUN_TESTS, code=right),) * max_turns),
        )
        return ReferenceSolutions(gold, wrong, {"passed": 1.0})

    return of


def code_message(source: str) -> Message:
    return Message.assistant(f"```python\n{source.strip()}\n```")


def return_none(source: str, names: tuple[str, ...]) -> str:
    """Return the source with ``return None`` as the body of each function in ``names``."""
    tree = parse_source(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(tree)
