"""Mathematics: problems with one right answer (GSM8K, MATH), and a Python interpreter to compute with."""

from __future__ import annotations

from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.core.world import World
from agent_r1.env.adapters.packages import require
from agent_r1.env.python_tool import python_tool
from agent_r1.env.sandbox import Level, Sandbox, SandboxConfig
from agent_r1.env.toolenv import ToolEnv
from agent_r1.tasks.math.problems import read_problems
from agent_r1.tasks.math.scorer import AnswerChecker, MathScorer
from agent_r1.tasks.math.solutions import solutions_of
from agent_r1.tasks.splits import GIVEN_OUT, everything, read_splits, tasks_of, whole_of

MAX_TURNS = 5

SYSTEM = (
    "Solve the problem. Think it through; where computing helps, run Python code with the tool. "
    "Give the final answer, and nothing else in the box, as \\boxed{answer}."
)


def build(data: Path | None, corpus: str | Path | None, seed: int, level: Level) -> World:
    """The world of a file of problems.

    Args:
        data: a file, a folder with one per split, or a data set on the hub (see ``problems`` and ``tasks.splits``).
        corpus: nothing is searched here.
        seed: orders the training problems.
        level: of the sandbox that the python tool runs in.

    Raises:
        InvalidInput: a file is missing or broken, math-verify is missing, or the sandbox's level does not hold here.
    """
    if data is None:
        raise InvalidInput(
            "--data for math", got="nothing", do="give the file of its problems, or hf:openai/gsm8k:main"
        )
    if corpus is not None:
        raise InvalidInput("corpus", got=corpus, do="leave it out: nothing is searched here")
    require("math_verify", extra="math")
    splits = read_splits(data, seed, read_problems, GIVEN_OUT)
    sandbox = Sandbox(SandboxConfig(level=level))
    return World(
        name="math",
        env=ToolEnv([python_tool(sandbox)], max_turns=MAX_TURNS, system=SYSTEM),
        tasks=tasks_of(splits, data),
        scorers=(MathScorer(AnswerChecker()),),
        recipe={"sandbox": level, "reward_weights": {"correct": 1.0, "form": 0.0}},
        validation="validation" if splits["validation"] else None,
        whole=whole_of(splits),
        solutions=solutions_of(everything(splits), MAX_TURNS),
        sandbox=sandbox.in_force,
    )
