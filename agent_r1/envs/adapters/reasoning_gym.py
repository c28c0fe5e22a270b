"""reasoning-gym's procedural datasets (https://github.com/open-thought/reasoning-gym): tasks, and their own scorers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.packages import import_extra
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.adapters.pool import WorkerPool
from agent_r1.envs.adapters.processes import unwrap
from agent_r1.rewards.answers import final_answer

SCORE_SECONDS = 10.0
"""What scoring one answer may take."""

_INSTRUCTION = "Give the answer alone between <answer> and </answer>."
_RUNS_CODE = re.compile(r"\b(eval|exec|parse_expr)\(")
_REPEATS = 20  # a dataset that gives the same question so often has no more


def reasoning_gym_tasks(
    dataset: str,
    train: int,
    test: int = 0,
    seed: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    instruction: str = _INSTRUCTION,
    run_answers: bool = False,
) -> list[Task]:
    """Tasks of a dataset: ``train`` of them in the split train and ``test`` in the split test, all different questions.

    One draw serves both splits, because the datasets of two seeds that lie near each other share most questions.

    Args:
        dataset: its name, e.g. ``chain_sum``.
        train: tasks to train on.
        test: tasks to evaluate on.
        seed: of the draw.
        options: of the dataset, e.g. ``{"max_terms": 2}``.
        instruction: the system message; it must ask for the tags that :func:`reasoning_gym_score` reads.
        run_answers: some scorers run an answer as Python (``countdown``, ``n_queens``); such a dataset is refused
            unless this says that what the policy writes may be run here, outside a sandbox.

    Raises:
        InvalidInput: reasoning-gym is not installed, has no such dataset, or it has too few different questions.
    """
    options = dict(options or {})
    made = _dataset(dataset, options | {"seed": seed, "size": _REPEATS * (train + test)})
    runs_code = _RUNS_CODE.search(inspect.getsource(made.score_answer)) is not None
    if runs_code and not run_answers:
        do = "choose another, or set run_answers=True where what the policy writes may be run on this machine"
        raise InvalidInput(f"dataset {dataset!r}", got="a scorer that runs answers as Python", do=do)
    messages = (Message.system(instruction),) if instruction else ()
    tasks = [
        Task(
            f"{dataset}/{place}",
            (*messages, Message.user(entry["question"])),
            {"dataset": dataset, "options": options, "entry": entry, "sandbox": _OUTSIDE if runs_code else None},
            "train" if number < train else "test",
        )
        for number, (place, entry) in zip(range(train + test), _different(made), strict=False)
    ]
    if len(tasks) < train + test:
        raise InvalidInput(f"dataset {dataset!r}", got=f"only {len(tasks)} different questions", do="ask for fewer")
    return tasks


_OUTSIDE = "none: the scorer of reasoning-gym runs answers"
"""What the tasks of such a dataset say, for the record of a run."""


def _different(made: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and entry of each question that was not there before."""
    seen: set[str] = set()
    for place in range(len(made)):
        entry = made[place]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield place, entry


def _dataset(name: str, options: dict[str, Any]) -> Any:
    reasoning_gym = import_extra("reasoning_gym", extra="reasoning-gym")
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise InvalidInput(f"dataset {name!r}", got=str(error), do="see the datasets of reasoning-gym") from error


async def reasoning_gym_score(trajectory: Trajectory, task: Task) -> float:
    """What the dataset's own scorer gives the final answer, in 0..1; 0.0 where there is no answer.

    It is computed in another process, which is killed where that takes too long. Raises AgentR1Error then, so that
    the attempt counts as not scored.
    """
    answer = final_answer(trajectory)
    if answer is None:
        return 0.0
    data = task.data
    outcome = await _SCORERS.call("score", data["dataset"], data["options"], answer, data["entry"])
    return float(unwrap(outcome, "scoring"))


class DatasetScorer:
    """The scorers of all datasets, in a process of their own."""

    def score(self, dataset: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
        return float(_dataset(dataset, options | {"seed": 0, "size": 1}).score_answer(answer, entry))


_SCORERS = WorkerPool("reasoning_gym", f"{__name__}:DatasetScorer", SCORE_SECONDS)
