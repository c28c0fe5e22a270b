"""Mathematics: problems with one right answer (GSM8K, MATH), and a Python tool for the computations."""

from __future__ import annotations

from pathlib import Path

from agent_r1.core.errors import InvalidInput, require_extra
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.sandbox.config import SandboxConfig, SandboxLevel
from agent_r1.sandbox.sandbox import Sandbox
from agent_r1.tasksets.math.problems import read_problems
from agent_r1.tasksets.math.scorer import AnswerChecker, MathScorer
from agent_r1.tasksets.math.solutions import solutions_of
from agent_r1.tasksets.splits import GIVEN_OUT, all_questions, read_splits, tasks_function, whole_split
from agent_r1.tools.python_tool import python_tool

MAX_TURNS = 5

SYSTEM = (
    "Solve the problem. Think it through; where computing helps, run Python code with the tool. "
    "Give the final answer, and nothing else in the box, as \\boxed{answer}."
)


def build(data: Path | None, corpus: str | Path | None, seed: int, level: SandboxLevel) -> TaskSet:
    """Build the task set of the problems in ``data`` (see :func:`agent_r1.tasksets.build`).

    Raises InvalidInput if an argument cannot be used, or if math-verify is not installed.
    """
    if data is None:
        raise InvalidInput(
            "--data for math", got="nothing", do="give the file of its problems, or hf:openai/gsm8k:main"
        )
    if corpus is not None:
        raise InvalidInput("corpus", got=corpus, do="leave it out: nothing is searched here")
    require_extra("math_verify", extra="math")
    splits = read_splits(data, seed, read_problems, GIVEN_OUT)
    sandbox = Sandbox(SandboxConfig(level=level))
    return TaskSet(
        name="math",
        env=ToolEnv([python_tool(sandbox)], max_turns=MAX_TURNS, system=SYSTEM),
        tasks=tasks_function(splits, data),
        scorers=(MathScorer(AnswerChecker()),),
        rewards=("correct", "form"),
        recipe={"sandbox": level, "reward_weights": {"correct": 1.0, "form": 0.0}},
        validation="validation" if splits["validation"] else None,
        whole=whole_split(splits),
        solutions=solutions_of(all_questions(splits), MAX_TURNS),
        sandbox=sandbox.isolation,
    )
