"""Code: the agent writes a function (HumanEval, MBPP) and tries it on public examples. Hidden tests grade it."""

from __future__ import annotations

from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import SandboxConfig, SandboxLevel
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.code.exam import packages_for
from agent_r1.tasksets.code.problems import read_problems
from agent_r1.tasksets.code.scorer import CodeScorer, repair_rates
from agent_r1.tasksets.code.solutions import solutions_of
from agent_r1.tasksets.code.tool import run_tests_tool
from agent_r1.tasksets.splits import GIVEN_OUT, all_questions, read_splits, tasks_function, whole_split

MAX_TURNS = 5

SYSTEM = (
    "Write a Python function. Try your solution with the run_tests tool, which runs it on the examples that you see; "
    "mend what is wrong, and try again. There are further tests that you do not see. "
    "When it is right, give the whole solution, and nothing else, in a ```python block."
)


def build(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    """Build the task set of the problems in ``data`` (see :func:`agent_r1.tasksets.build`).

    Raises InvalidInput if an argument cannot be used, or if the tests need a package that is not installed.
    """
    if data is None:
        raise InvalidInput(
            "--data for code", got="nothing", do="give the file of its problems, or hf:openai/openai_humaneval"
        )
    if corpus is not None:
        raise InvalidInput("corpus", got=corpus, do="leave it out: nothing is searched here")
    splits = read_splits(data, seed, read_problems, GIVEN_OUT)
    sandbox = Sandbox(SandboxConfig(level=level, packages=packages_for(p.exam for p in all_questions(splits))))
    return TaskSet(
        name="code",
        env=ToolEnv([run_tests_tool(sandbox)], max_turns=MAX_TURNS, system=SYSTEM),
        tasks=tasks_function(splits, data),
        scorers=(CodeScorer(sandbox),),
        rewards=("passed", "form", "first_passed"),
        recipe={"sandbox": level, "reward_weights": {"passed": 1.0, "form": 0.0, "first_passed": 0.0}},
        validation="validation" if splits["validation"] else None,
        whole=whole_split(splits),
        solutions=solutions_of(MAX_TURNS),
        measures=repair_rates,
        sandbox=sandbox.isolation,
    )
