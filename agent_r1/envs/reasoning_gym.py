"""Tasks from the procedural datasets of reasoning-gym (https://github.com/open-thought/reasoning-gym).

The scorer of a dataset gives the score of each answer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.core.errors import InvalidInput, import_extra
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.processes import ProcessPool, unwrap
from agent_r1.rewards.scoring import final_answer

SCORE_SECONDS = 10.0

_INSTRUCTION = "Give the answer alone between <answer> and </answer>."
_RUNS_CODE = re.compile(r"\b(eval|exec|parse_expr)\(")
_OVERSAMPLING = 20  # entries drawn per task, because questions of a dataset repeat
_UNSANDBOXED = "none: the scorer of reasoning-gym runs answers"  # the value of data["sandbox"] of such tasks


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
    """Return ``train`` and ``test`` tasks of the splits "train" and "test". No question occurs twice.

    Calls with neighboring values of ``seed`` return mostly the same questions. For different questions, choose values
    that are far apart.

    Args:
        dataset: the name of the dataset, e.g. ``chain_sum``.
        options: options of the dataset, e.g. ``{"max_terms": 2}``.
        instruction: the system message. It must request the tags that :func:`reasoning_gym_score` reads.
        run_answers: allow datasets whose scorer runs answers as Python (``countdown``, ``n_queens``). Code written by
            the policy then runs on this machine without a sandbox.
    """
    options = dict(options or {})
    entries = _create_dataset(dataset, options | {"seed": seed, "size": _OVERSAMPLING * (train + test)})
    runs_code = _RUNS_CODE.search(inspect.getsource(entries.score_answer)) is not None
    if runs_code and not run_answers:
        do = "choose another, or set run_answers=True if code written by the policy may run on this machine"
        raise InvalidInput(f"dataset {dataset!r}", got="a scorer that runs answers as Python", do=do)
    messages = (Message.system(instruction),) if instruction else ()
    tasks = [
        Task(
            f"{dataset}/{index}",
            (*messages, Message.user(entry["question"])),
            {"dataset": dataset, "options": options, "entry": entry, "sandbox": _UNSANDBOXED if runs_code else None},
            "train" if number < train else "test",
        )
        for number, (index, entry) in zip(range(train + test), _unique_questions(entries), strict=False)
    ]
    if len(tasks) < train + test:
        raise InvalidInput(f"dataset {dataset!r}", got=f"only {len(tasks)} different questions", do="ask for fewer")
    return tasks


def _unique_questions(entries: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    seen: set[str] = set()
    for index in range(len(entries)):
        entry = entries[index]
        if entry["question"] not in seen:
            seen.add(entry["question"])
            yield index, entry


def _create_dataset(name: str, options: dict[str, Any]) -> Any:
    return import_extra("reasoning_gym", extra="reasoning-gym").create_dataset(name, **options)


async def reasoning_gym_score(trajectory: Trajectory, task: Task) -> float:
    """Return the dataset's score of the final answer, from 0 to 1; 0.0 if the trajectory has no final answer.

    Raise AgentR1Error if the scorer fails or exceeds its time limit.
    """
    answer = final_answer(trajectory)
    if answer is None:
        return 0.0
    data = task.data
    outcome = await _SCORERS.call("score", data["dataset"], data["options"], answer, data["entry"])
    return float(unwrap(outcome, "scoring"))


class DatasetScorer:
    def score(self, dataset: str, options: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
        return float(_create_dataset(dataset, options | {"seed": 0, "size": 1}).score_answer(answer, entry))


_SCORERS = ProcessPool("reasoning_gym", f"{__name__}:DatasetScorer", SCORE_SECONDS)
