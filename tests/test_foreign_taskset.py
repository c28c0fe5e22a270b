"""The training on a data set of reasoning-gym: its questions, its blind rules, and its base model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_scripts import load_benchmark
from extras import requires
from preloaded import run_python

from agent_r1 import Message, Task
from agent_r1.core.messages import Action
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.store.reader import RunReader
from agent_r1.training.user_task import load_task_file

pytestmark = requires("reasoning_gym", "reasoning-gym")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "alice.py"
NAMES = [
    *("James", "John", "Robert", "Michael", "William", "David", "Richard", "Joseph", "Thomas", "Charles", "Bob"),
    *(
        "Mary",
        "Patricia",
        "Jennifer",
        "Linda",
        "Elizabeth",
        "Barbara",
        "Susan",
        "Jessica",
        "Sarah",
        "Margaret",
        "Alice",
    ),
]
HAND = Task("hand", (Message.user("Alice has 3 sisters and she also has 6 brothers. How many sisters?"),))


BENCHMARK = load_benchmark("foreign_taskset")


@pytest.fixture(scope="module")
def taskset() -> TaskSet:
    return load_task_file(EXAMPLE, "a/model")


def attempt(task: Task, text: str, member: int = 0) -> Trajectory:
    turn = Turn(0, None, (), (), (), (), "stop", Action(Message.assistant(text), text))
    return Trajectory(AttemptId("run", task.id, 0, member), task.id, (turn,), Status.COMPLETED)


def rewards(taskset: TaskSet, group: Sequence[Trajectory], task: Task) -> list[float]:
    (scorer,) = taskset.scorers
    return [float(next(iter(one.values()))) for one in asyncio.run(scorer.score(group, task))]  # type: ignore[arg-type]


def pairs(tasks: Sequence[Task]) -> set[tuple[str, ...]]:
    return {tuple(re.findall(r"\d+", task.messages[-1].text)) for task in tasks}


def without_names(task: Task) -> str:
    """Return the question without the names that the data set uses."""
    return re.sub(rf"\b({'|'.join(NAMES)})\b", "", task.messages[-1].text)


def test_no_held_out_question_occurs_in_training_with_other_names(taskset: TaskSet) -> None:
    train, test = taskset.tasks("train"), taskset.tasks("test")
    assert (len(train), len(test)) == (1500, 360)
    assert not set(map(without_names, train)) & set(map(without_names, test))
    assert len(set(map(without_names, test))) == 36


def test_the_held_out_pairs_of_numbers_are_new_and_the_numbers_are_not(taskset: TaskSet) -> None:
    train, test = pairs(taskset.tasks("train")), pairs(taskset.tasks("test"))
    assert (len(train), len(test)) == (52, 12) and not train & test
    assert all(first != last for first, last in test)
    for place in (0, 1):
        assert {pair[place] for pair in train} == set("12345678")


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_wording_is_a_third_of_either_split(taskset: TaskSet, split: str) -> None:
    counts = Counter(re.findall(r"\d ([a-z ]+) and she", task.messages[-1].text)[0] for task in taskset.tasks(split))
    third = len(taskset.tasks(split)) // 3
    assert counts == {"sisters": third, "brothers": third, "male friends": third}
    names = Counter(task.data["wording"] for task in taskset.tasks(split))
    assert names == {"sisters first": third, "brothers first": third, "friends": third}


def test_the_answer_is_the_number_asked_for_and_one_more(taskset: TaskSet) -> None:
    task = next(task for task in taskset.tasks("train") if " brothers and " in task.messages[-1].text)
    brothers, sisters = map(int, BENCHMARK._numbers(task.messages[-1].text))
    answers = (sisters + 1, sisters, sisters + 2) if sisters == brothers else (sisters + 1, sisters, brothers + 1)
    group = [attempt(task, f"<answer>{number}</answer>", member) for member, number in enumerate(answers)]
    assert rewards(taskset, group, task) == [1.0, 0.0, 0.0]


TABLE = "table of training, else by topic"


def test_rules_that_ignore_the_wording_answer_at_most_two_thirds(taskset: TaskSet) -> None:
    rules = BENCHMARK.blind_rules(taskset.tasks("train"), taskset.tasks("test"))
    assert rules.pop("best constant answer") < 0.25
    assert len(rules) == 5 and all(0.3 < share < 0.68 for share in rules.values())
    assert rules["by topic"] == rules[TABLE] == pytest.approx(2 / 3)


def test_the_table_of_training_questions_detects_a_leaked_question(taskset: TaskSet) -> None:
    train, test = taskset.tasks("train"), taskset.tasks("test")
    first = [task for task in test if BENCHMARK.nameless(BENCHMARK._question(task)).startswith("_ has 1 brothers")]
    rules = BENCHMARK.blind_rules([*train, *first], test)
    assert rules[TABLE] == pytest.approx(rules["by topic"] + len(first) / len(test)) and first


def test_the_rule_by_topic_is_right_without_the_second_wording(taskset: TaskSet) -> None:
    few = [task for task in taskset.tasks("test") if "brothers and" not in task.messages[-1].text]
    assert BENCHMARK.blind_rules(taskset.tasks("train"), few)["by topic"] == 1.0


def test_the_new_wording_asks_for_the_first_number(taskset: TaskSet) -> None:
    test = taskset.tasks("test")
    reworded = BENCHMARK.reworded(test)
    assert len(reworded) == 120 and not {task.id for task in reworded} - {task.id for task in test}
    text = reworded[0].messages[-1].text
    females, males = re.findall(r"(\d) (fe)?male friends", text)
    assert females[1] == "fe" and males[1] == "" and text.index("female") < text.index(" male friends")
    group = [attempt(reworded[0], f"<answer>{int(number) + 1}</answer>") for number, _ in (females, males)]
    assert rewards(taskset, group, reworded[0]) == [1.0, 0.0]


def test_the_result_of_a_seed_has_the_score_of_each_wording() -> None:
    names = ["sisters first", "friends", "friends", "brothers first"]
    shares = {"brothers first": 0.0, "friends": 0.5, "sisters first": 1.0}
    assert BENCHMARK.mean_by_name(names, [1.0, 1.0, 0.0, 0.0]) == shares
    result = BENCHMARK.SeedResult(names, [0.0] * 4, [1.0, 1.0, 0.0, 0.0], [0.0] * 4, [0.25], 1.0, 2.0)
    assert result.cells()[2:6] == ["0.00", "0.50", "1.00", "0.25"]


def test_the_guesses_are_uniform_over_both_numbers_and_their_neighbors() -> None:
    draws = random.Random(0)
    answers = [BENCHMARK.guess(HAND.messages[0].text, draws) for _ in range(3000)]
    for number in (2, 3, 4, 5, 6, 7):
        assert answers.count(f"<answer>{number}</answer>") / 3000 == pytest.approx(1 / 6, abs=0.03)


def test_the_base_trains_with_the_command_of_the_example(
    taskset: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(BENCHMARK, "BASE_STEPS", 60)
    few = replace(taskset, tasks=lambda split: taskset.tasks(split)[:400])
    BENCHMARK.make_base(few, tmp_path / "base", 0)
    command = ["-m", "agent_r1.cli", "train", str(EXAMPLE), "--model", str(tmp_path / "base")]
    small = {"steps": 1, "groups_per_step": 8, "group_size": 8, "max_tokens": 8, "context": 256, "evaluate_n": 4}
    options = [f"--{name}={value}" for name, value in {**small, "run": tmp_path / "run"}.items()]
    done = run_python(*command, *options, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
    reader = RunReader(tmp_path / "run")
    scored = [trajectory.rewards["reasoning_gym_score"] for trajectory in reader.trajectories()]
    reader.close()
    assert len(scored) == 64 and 0.03 < statistics.fmean(map(float, scored)) < 0.45  # type: ignore[arg-type]
