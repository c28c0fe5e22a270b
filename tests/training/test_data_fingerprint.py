"""A run is resumed only with the questions and passages it began with, wherever their files are."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resuming import config_of, resume, train_with_images

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId
from agent_r1.store.verification import verify
from agent_r1.training.preflight import fingerprint_data


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "my questions.json").write_text("[1]", "utf-8")
    return tmp_path / "my questions.json"


def test_the_fingerprint_of_a_file_is_its_hash(micro: TaskSet, questions: Path, tmp_path: Path) -> None:
    file, tasks = fingerprint_data(config_of(micro, tmp_path / "run", {"data": questions}), micro)
    digest = "080a9ed428559ef602668b4c00f114f1a11c3f6b02a435f0bdc154578e4d7f22"
    assert file == LogEvent("fingerprint", f"data {questions} sha256 {digest}")
    assert tasks.kind == "fingerprint" and tasks.detail.startswith("tasks sha256 ")


def test_the_fingerprint_of_a_folder_covers_names_and_contents_but_no_hidden_files(
    micro: TaskSet, tmp_path: Path
) -> None:
    def digest() -> tuple[LogEvent, ...]:
        return fingerprint_data(config_of(micro, tmp_path / "run", {"corpus": str(tmp_path / "corpus")}), micro)

    (tmp_path / "corpus" / "part").mkdir(parents=True)
    seen = [digest()]
    for name, text in (("part/a", "1"), ("part/a", "2"), ("part/b", "2")):
        (tmp_path / "corpus" / name).write_text(text, "utf-8")
        seen.append(digest())
    (tmp_path / "corpus" / "part" / ".DS_Store").write_text("x", "utf-8")
    assert len(set(seen)) == 4 and digest() == seen[-1]


def one(**changes: Any) -> Task:
    return replace(Task("a", (Message.user("Where?"),), {"answers": ("x", 1.5, None), "seen": {"b", "a"}}), **changes)


OTHERS: Mapping[str, Sequence[Task]] = {
    "order": [one(id="b"), one()],
    "id": [one(), one(id="c")],
    "message": [one(), one(id="b", messages=(Message.user("Who?"),))],
    "answer": [one(), one(id="b", data={"answers": ("x", 1.5, 0), "seen": {"a", "b"}})],
    "number": [one()],
    "dataclass": [
        one(data={"exam": AttemptId("run", "task", 0, 0)}),
        one(data={"exam": AttemptId("run", "task", 0, 1)}),
    ],
}


def digest_of(taskset: TaskSet, place: Path, *tasks: Task) -> str:
    taskset = replace(taskset, tasks=lambda split: tasks, validation=None)
    return fingerprint_data(config_of(taskset, place, {}), taskset)[-1].detail


def test_data_that_is_not_json_is_covered(micro: TaskSet, tmp_path: Path) -> None:
    holding_itself: dict[str, Any] = {}
    holding_itself["self"] = holding_itself
    strange: list[Any] = [
        b"1",
        b"2",
        10**5000,
        10**5001,
        AttemptId("r", "t", 0, 0),
        AttemptId("r", "t", 0, 1),
        holding_itself,
    ]
    digests = [digest_of(micro, tmp_path, one(data={"exam": value})) for value in strange]
    assert len(set(digests)) == len(strange)


def test_the_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "from agent_r1.core.task import hash_tasks; from agent_r1.core.task import Task;"
        "print(hash_tasks([Task('a', (), {'x': {frozenset('abcdef'): 1, 2: {'b', 'a', 'c'}}})]))"
    )
    command = [sys.executable, "-c", script]
    hashes = {subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": str(seed)}) for seed in (1, 2)}
    assert len(hashes) == 1


@pytest.mark.parametrize("what", OTHERS)
def test_every_field_of_a_task_is_covered(what: str, micro: TaskSet, tmp_path: Path) -> None:
    def digest(tasks: Sequence[Task]) -> tuple[LogEvent, ...]:
        taskset = replace(micro, tasks=lambda split: tasks, validation=None)
        return fingerprint_data(config_of(micro, tmp_path / "run", {}), taskset)

    own = [one(), one(id="b", data={"seen": {"a", "b"}, "answers": ["x", 1.5, None]})]
    assert digest(own) == digest([one(), one(id="b")]) != digest(OTHERS[what])


@pytest.fixture(scope="module")
def trained(micro: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, object]:
    place = tmp_path_factory.mktemp("trained")
    questions = place / "my questions.json"
    questions.write_text("[1]", "utf-8")
    made = train_with_images(micro, place, {"steps": 2, "data": questions})
    return place / "step-2", questions, made


def test_a_run_with_changed_questions_is_refused_and_opens_no_segment(
    micro: TaskSet, trained: tuple[Path, Path, object]
) -> None:
    run, questions, _ = trained
    questions.write_text("[2]", "utf-8")
    with pytest.raises(InvalidInput, match=r"^data: got others than the run's: sha256 .*; put back what"):
        resume(micro, run)
    fewer = replace(micro, tasks=lambda split: micro.tasks(split)[1:])
    questions.write_text("[1]", "utf-8")
    with pytest.raises(InvalidInput, match=r"^tasks: got others than the run's: sha256 .*; put back what"):
        resume(fewer, run)
    assert verify(run).segments == 1


@pytest.mark.parametrize("other", [{"data": "hf:owner/name"}, {"corpus": "http://127.0.0.1:8000"}])
def test_data_without_a_fingerprint_cannot_change(
    other: dict[str, str], micro: TaskSet, trained: tuple[Path, Path, object]
) -> None:
    [what] = other
    with pytest.raises(InvalidInput, match=f"^{what}: got .*; leave it out: .* continues with .*cannot be compared"):
        resume(micro, trained[0], **other)


def test_the_questions_can_be_moved(micro: TaskSet, trained: tuple[Path, Path, object], tmp_path: Path) -> None:
    run, questions, made = trained
    moved = Path(shutil.copy(questions, tmp_path / "moved.json"))
    copied = Path(shutil.copytree(run, tmp_path / "step-2"))
    assert resume(micro, copied, data=moved) == made
