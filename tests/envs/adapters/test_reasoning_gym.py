"""Datasets of reasoning-gym and their scorers, which run in a process that can be killed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib import import_module

import pytest
from extras import requires

from agent_r1 import Task, ToolEnv, Trajectory
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.trajectory import Unscored
from agent_r1.envs import reasoning_gym
from agent_r1.envs.processes import ProcessPool
from agent_r1.envs.reasoning_gym import reasoning_gym_score, reasoning_gym_tasks
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.training.user_task import make_taskset

pytestmark = requires("reasoning_gym", "reasoning-gym")

SMALL = {"max_terms": 2, "max_digits": 1}
Answered = Callable[[str], Trajectory]


@pytest.fixture
def answered(make_trajectory, make_action) -> Answered:
    return lambda text: make_trajectory((make_action(text), ()))


def score(trajectory: Trajectory, task: Task) -> float:
    return asyncio.run(reasoning_gym_score(trajectory, task))


def test_gold_answers_get_the_full_score_and_others_do_not(answered: Answered) -> None:
    names = ("chain_sum", "letter_counting", "family_relationships")
    tasks = [task for name in names for task in reasoning_gym_tasks(name, 3)]

    async def both(task: Task) -> tuple[float, float, float]:
        gold = answered(f"Let me see. <answer>{task.data['entry']['answer']}</answer>")
        return (
            await reasoning_gym_score(gold, task),
            await reasoning_gym_score(answered("<answer>a guess</answer>"), task),
            await reasoning_gym_score(answered("I do not know"), task),
        )

    async def every() -> list[tuple[float, float, float]]:
        return await asyncio.gather(*map(both, tasks))

    for gold, guess, silence in asyncio.run(every()):
        assert gold == 1.0 and guess < 0.1 and silence == 0.0


def test_the_splits_share_no_question() -> None:
    tasks = reasoning_gym_tasks("chain_sum", 60, 30, options=SMALL)
    questions = {split: {task.messages[1].text for task in tasks if task.split == split} for split in ("train", "test")}
    assert len(questions["train"]) == 60 and len(questions["test"]) == 30
    assert not questions["train"] & questions["test"]


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert reasoning_gym_tasks("chain_sum", 5, seed=3) == reasoning_gym_tasks("chain_sum", 5, seed=3)
    assert reasoning_gym_tasks("chain_sum", 5, seed=3) != reasoning_gym_tasks("chain_sum", 5, seed=4)


def test_a_scorer_that_hangs_is_killed_and_others_continue(answered: Answered, monkeypatch) -> None:
    monkeypatch.setattr(
        reasoning_gym, "_SCORERS", ProcessPool("reasoning_gym", f"{reasoning_gym.__name__}:DatasetScorer", 4.0)
    )
    hanging = reasoning_gym_tasks("countdown", 1, run_answers=True)[0]
    fine = reasoning_gym_tasks("gcd", 1)[0]

    async def side_by_side() -> list[object]:
        scorer = FunctionScorer({"score": reasoning_gym_score})
        attempts = [(answered("<answer>9**9**9**9</answer>"), hanging)]
        attempts += [(answered(f"<answer>{fine.data['entry']['answer']}</answer>"), fine)] * 4
        scored = await asyncio.gather(*(scorer.score([trajectory], task) for trajectory, task in attempts))
        return [rewards["score"] for (rewards,) in scored]

    asyncio.run(reasoning_gym_score(answered("<answer>1</answer>"), fine))  # the import is paid before the clock runs
    hung, *others = asyncio.run(side_by_side())
    assert isinstance(hung, Unscored) and others == [1.0, 1.0, 1.0, 1.0]  # not scored is not 0.0
    with pytest.raises(AgentR1Error, match=r"scoring failed: no answer within 4 seconds"):
        score(answered("<answer>9**9**9**9</answer>"), hanging)


def test_tasks_whose_scorer_runs_answers_declare_that_there_is_no_sandbox() -> None:
    env = ToolEnv(tools=[], rewards=[reasoning_gym_score], max_turns=1)
    running = make_taskset(env, reasoning_gym_tasks("countdown", 2, run_answers=True), "own", "")
    assert running.sandbox == "none: the scorer of reasoning-gym runs answers"
    assert make_taskset(env, reasoning_gym_tasks("gcd", 2, run_answers=True), "own", "").sandbox is None


def test_scorers_that_run_answers_are_refused_by_default() -> None:
    running = [
        name
        for name, (kind, _) in import_module("reasoning_gym").factory.DATASETS.items()
        if "eval(" in inspect.getsource(kind.score_answer) or "parse_expr(" in inspect.getsource(kind.score_answer)
    ]
    assert {"countdown", "n_queens", "spiral_matrix"} <= set(running)
    for name in running:
        with pytest.raises(InvalidInput, match="a scorer that runs answers as Python"):
            reasoning_gym_tasks(name, 1)


def test_too_few_questions_are_an_error_of_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"got only [0-9]+ different questions; ask for fewer"):
        reasoning_gym_tasks("chain_sum", 500, options=SMALL)
