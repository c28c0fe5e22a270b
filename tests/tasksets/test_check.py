"""Every task set passes its own check: right solutions earn full rewards and wrong solutions do not."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from film_pages import write_pages
from multihop_pages import write_multihop
from sandboxed import sandbox_or_skip

from agent_r1.core.taskset import TaskSet
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.sandbox.config import Limits
from agent_r1.tasksets import TASKSETS, build
from agent_r1.training.check import CheckReport, check
from agent_r1.training.progress import SilentProgress

ROWS = [
    {"id": f"q{i}", "question": f"Who rules town {i}, or is it {name} or X?", "answers": [name, f"{name} the Great"]}
    for i, name in enumerate(("Bruno", "Corin", "Dovra", "yes", "Ebba", "no"))
]
PASSAGES = [{"title": f"Town {i}", "text": f"Town {i} is ruled by {row['answers'][0]}."} for i, row in enumerate(ROWS)]


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def multihop(name: str) -> Callable[[Path], TaskSet]:
    return lambda folder: build(name, lines(folder / "q.jsonl", ROWS), lines(folder / "p.jsonl", PASSAGES), 0)


def mixture(folder: Path) -> TaskSet:
    lines(folder / "q.jsonl", ROWS)
    (folder / "mixture.toml").write_text('[test.towns]\ndata = "q.jsonl"\n', "utf-8")
    return build("multihop", folder / "mixture.toml", lines(folder / "p.jsonl", PASSAGES), 0)


ENVIRONMENTS = Path(__file__).parents[2] / "environments"


def mathematics(folder: Path) -> TaskSet:
    if find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed (extra math)")
    sandbox_or_skip(Limits(seconds=5))
    rows = [{"question": f"What is {i} and {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(3, 9)]
    return build("math", lines(folder / "q.jsonl", rows), None, 0)


def code(folder: Path) -> TaskSet:
    sandbox_or_skip(Limits(seconds=5))
    rows = [
        {
            "task_id": i,
            "text": f"Write a function to add {i}.",
            "code": f"def add_{i}(x):\n    return x + {i}",
            "test_list": [f"assert add_{i}(1) == {1 + i}", f"assert add_{i}(5) == {5 + i}"],
            "test_setup_code": "",
        }
        for i in range(1, 5)
    ]
    return build("code", lines(folder / "q.jsonl", rows), None, 0)


def code_repair(folder: Path) -> TaskSet:
    sandbox_or_skip(Limits(seconds=5))
    rows = [
        {
            "task_id": i,
            "text": f"Write a function to add {i} to a positive number.",
            "code": f"def add_{i}(x):\n    if x < 0:\n        return 0\n    return x + {i}",
            "test_list": [f"assert add_{i}({x}) == {y}" for x, y in ((1, 1 + i), (5, 5 + i), (-3, 0))],
            "test_setup_code": "",
        }
        for i in range(2, 8)
    ]
    return build(str(ENVIRONMENTS / "code_repair"), lines(folder / "q.jsonl", rows), None, 0)


def multihop_small(folder: Path) -> TaskSet:
    data, corpus = write_multihop(folder)
    return build(str(ENVIRONMENTS / "multihop_small.py"), data, corpus)


SMALL: dict[str, Callable[[Path], TaskSet]] = {
    "tinywiki": lambda folder: build("tinywiki"),
    **{name: multihop(name) for name in ("hotpotqa", "2wiki", "musique")},
    "multihop": mixture,
    "math": mathematics,
    "code": code,
    "environments/people": lambda folder: build(str(ENVIRONMENTS / "people")),
    "environments/wikifilm": lambda folder: build(str(ENVIRONMENTS / "wikifilm"), write_pages(folder / "pages.jsonl")),
    "environments/multihop_small.py": multihop_small,
    "environments/code_repair": code_repair,
    **{
        f"environments/{file}": lambda folder, file=file: build(str(ENVIRONMENTS / file))
        for file in ("orders.py", "unreliable.py", "memory.py", "shapes.py")
    },
}
"""A small instance of each task set; the first test fails if one is missing."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TaskSet]:
    return cache(lambda name: SMALL[name](tmp_path_factory.mktemp("data")))


def checked(taskset: TaskSet, n: int = 2) -> CheckReport:
    return check(taskset, SilentProgress(), n=n)


def test_every_taskset_is_checked_here() -> None:
    files = {f"environments/{path.name}" for path in ENVIRONMENTS.iterdir() if path.name[0] != "_"}
    elsewhere = {"environments/bfcl"}  # tests/environments/test_bfcl.py: it needs a package
    assert set(SMALL) == {*TASKSETS, *files} - {"environments/shared.py"} - elsewhere


@pytest.mark.parametrize("name", SMALL)
def test_right_solutions_pass_and_wrong_solutions_fail(name: str, small: Callable[[str], TaskSet]) -> None:
    found = checked(small(name))
    assert found.passed, found.failures[:5]
    assert found.gold.passed == found.gold.played >= sum(found.tasks.values()) > 0
    assert found.wrong.passed == found.wrong.played >= 3 * sum(found.tasks.values())


@pytest.mark.parametrize("name", ["tinywiki", "environments/orders.py"])
@pytest.mark.parametrize(("mark", "side"), [(1.0, "wrong"), (0.0, "gold")])
def test_a_constant_scorer_fails_the_check(name: str, mark: float, side: str, small: Callable[[str], TaskSet]) -> None:
    taskset = small(name)
    assert taskset.solutions is not None
    full = taskset.solutions(taskset.tasks(taskset.whole or taskset.evaluation[0])[0]).expected_rewards
    same = FunctionScorer({reward: lambda trajectory, task: mark for reward in full})
    found = checked(replace(taskset, scorers=(same,)), n=1)
    count = {"gold": found.gold, "wrong": found.wrong}[side]
    assert not found.passed and count.passed == 0 < count.played
    assert {fault.reason.split(",")[0] for fault in found.failures} == {side}


def test_a_gold_answer_that_cannot_be_scored_is_reported(tmp_path: Path) -> None:
    taskset = multihop("musique")(tmp_path)
    task = taskset.tasks("all")[0]
    broken = replace(task, data={**task.data, "answers": ("Bruno",)})
    right = replace(task, data={**task.data, "answers": ("Corin",)})
    solutions = taskset.solutions
    assert solutions is not None
    found = checked(replace(taskset, tasks=lambda split: [broken], solutions=lambda task: solutions(right)))
    assert found.gold.passed == 0 and {fault.task for fault in found.failures} == {task.id}
