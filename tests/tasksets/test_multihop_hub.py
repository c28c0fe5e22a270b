"""Data sets named as in the ``datasets`` library; the tests use local folders instead of downloads."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from extras import requires

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build
from agent_r1.tasksets.files import HubName, hub_name, read_splits
from agent_r1.tasksets.multihop.questions import read_questions

pytestmark = requires("datasets", "datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def row(number: int) -> dict[str, Any]:
    """Return a row in the form of the hub's HotpotQA: lists of pairs are columns."""
    name = f"Person{number:03}"
    return {
        "id": f"id{number}",
        "question": f"Where does {name} live?",
        "answer": f"City{number:03}",
        "type": "bridge",
        "supporting_facts": {"title": [name], "sent_id": [0]},
        "context": {"title": [name, "Other"], "sentences": [[f"{name} lives in City{number:03}."], ["Else."]]},
    }


def write_split(folder: Path, split: str, rows: list[dict[str, Any]]) -> None:
    import_module("datasets").Dataset.from_list(rows).to_parquet(folder / f"{split}-00000.parquet")


def folder_of(folder: Path, **parts: range) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, numbers in parts.items():
        write_split(folder, split, [row(number) for number in numbers])
    return folder


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:hotpotqa/hotpot_qa", HubName("hotpotqa/hotpot_qa", None, None)),
        ("hf:hotpotqa/hotpot_qa:distractor", HubName("hotpotqa/hotpot_qa", "distractor", None)),
        ("hf:hotpotqa/hotpot_qa:distractor@validation", HubName("hotpotqa/hotpot_qa", "distractor", "validation")),
        ("hf:dgslibisey/MuSiQue@train", HubName("dgslibisey/MuSiQue", None, "train")),
    ],
)
def test_a_name_selects_a_configuration_and_a_split(text: str, name: HubName) -> None:
    assert hub_name(Path(text)) == name
    assert str(name) == text


@pytest.mark.parametrize("text", ["hf:", "hf:a:b:c", "hf:a@b@c", "hf:a:", "hf:@train"])
def test_an_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="write hf:NAME"):
        hub_name(Path(text))


def test_a_split_is_read_like_a_file(tmp_path: Path) -> None:
    source = f"hf:{folder_of(tmp_path / 'hotpot', train=range(3), validation=range(3, 5))}"
    first, second = read_questions(Path(f"{source}@validation"))
    assert (first.id, first.answers, first.supporting) == ("id3", ("City003",), ("Person003",))
    assert first.context[0].text == "Person003 lives in City003."
    assert second.id == "id4"
    for name in (source, f"{source}@dev"):
        with pytest.raises(InvalidInput, match="end it with one of @train, @validation"):
            read_questions(Path(name))


def test_the_validation_part_is_tested_and_training_questions_validate(tmp_path: Path) -> None:
    # Question 0 is in both parts: it is tested and not trained on.
    source = Path(f"hf:{folder_of(tmp_path / 'hotpot', train=range(40), validation=(0, *range(50, 60)))}")
    splits = read_splits(source, 0, read_questions)
    ids = {split: {question.id for question in questions} for split, questions in splits.items()}
    assert ids["test"] == {"id0", *(f"id{number}" for number in range(50, 60))}
    assert (len(ids["validation"]), len(ids["train"])) == (3, 36)
    assert ids["validation"] | ids["train"] == {f"id{number}" for number in range(1, 40)}
    assert {question.id for question in read_splits(source, 1, read_questions)["validation"]} == ids["validation"]


def test_a_taskset_is_built_from_a_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hotpot", train=range(40), validation=range(50, 60))
    taskset = build("hotpotqa", Path(f"hf:{folder}"), None, 0)
    assert (len(taskset.tasks("train")), len(taskset.tasks("validation")), len(taskset.tasks("test"))) == (36, 4, 10)
    assert taskset.whole is None  # its test part is tested, also for a model trained on other data
    assert taskset.retrieval is not None and taskset.retrieval("test") == {"recall@5": 1.0}


def test_a_loading_error_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="name a data set that can be loaded") as caught:
        read_questions(Path(f"hf:{tmp_path / 'nothing'}"))
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidInput, match=r"without the datasets package; pip install 'agent-r1\[datasets\]'"):
        build("hotpotqa", Path("hf:hotpotqa/hotpot_qa:distractor"), None, 0)
