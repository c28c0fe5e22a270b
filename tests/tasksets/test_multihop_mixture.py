"""Several data sets in one task set: drawn numbers, no tested question in training, a column for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build
from agent_r1.tasksets.multihop.mixture import read_mixture


def write(folder: Path, name: str, numbers: range, word: str = "") -> None:
    rows = [{"id": str(n), "question": f"{word or name} {n}?", "answer": f"A{n}"} for n in numbers]
    (folder / f"{name}.json").write_text(json.dumps(rows), "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "hotpot", range(100))
    write(tmp_path, "wiki", range(60))
    write(tmp_path, "hotpot-dev", range(90, 120), word="hotpot")  # ten of its questions are also in the training file
    write(tmp_path, "musique", range(12))
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Alba", "text": "A river."}), "utf-8")
    return tmp_path


MIXTURE = """
[train.hotpotqa]
data = "hotpot.json"
count = 40
[train.2wiki]
data = "wiki.json"
count = 40
[validation.2wiki]
data = "wiki.json"
count = 5
[test.hotpotqa]
data = "hotpot-dev.json"
[test.2wiki]
data = "wiki.json"
count = 15
[test.musique]
data = "musique.json"
"""


def mixture_file(folder: Path, text: str = MIXTURE) -> Path:
    path = folder / "mixture.toml"
    path.write_text(text, "utf-8")
    return path


def texts(mixture, split: str) -> set[str]:
    return {question.text for question in mixture[0][split]}


def test_the_table_has_a_column_for_each_tested_set(folder: Path) -> None:
    taskset = build("multihop", mixture_file(folder), folder / "corpus.jsonl", 0)
    assert (taskset.name, taskset.evaluation, taskset.validation) == (
        "multihop",
        ("hotpotqa", "2wiki", "musique"),
        "validation",
    )
    assert {split: len(taskset.tasks(split)) for split in (*taskset.evaluation, "train", "validation")} == {
        "hotpotqa": 30,
        "2wiki": 15,
        "musique": 12,
        "train": 80,
        "validation": 5,
    }
    assert taskset.whole is None  # the file selects the tested questions, independent of training
    ids = [task.id for split in ("train", "validation", *taskset.evaluation) for task in taskset.tasks(split)]
    assert len(set(ids)) == len(ids)
    assert all(task.id.startswith("2wiki/2wiki/") for task in taskset.tasks("2wiki"))


def test_sets_are_drawn_in_the_requested_numbers_and_mixed(folder: Path) -> None:
    train = read_mixture(mixture_file(folder), 0)[0]["train"]
    sets = [question.id.split("/")[0] for question in train]
    assert (sets.count("hotpotqa"), sets.count("2wiki")) == (40, 40)
    assert 10 < sets[:40].count("hotpotqa") < 30  # mixed, not one set after the other


def test_no_tested_question_is_trained_on(folder: Path) -> None:
    for seed in range(5):
        mixture = read_mixture(mixture_file(folder), seed)
        tested = set().union(*(texts(mixture, split) for split in mixture[1]))
        assert not tested & texts(mixture, "train")
        assert not (tested | texts(mixture, "train")) & texts(mixture, "validation")
    # control: ten tested questions are in hotpot.json and would be drawn
    all_of_them = mixture_file(folder, MIXTURE.replace("count = 40", "count = 90", 1))
    assert len(texts(read_mixture(all_of_them, 0), "train")) == 130
    too_many = mixture_file(folder, MIXTURE.replace("count = 40", "count = 91", 1))
    with pytest.raises(InvalidInput, match=r"train.hotpotqa: got 91 questions wanted .* 90 not held for another split"):
        read_mixture(too_many, 0)


def test_the_seed_draws_the_training_questions_only(folder: Path) -> None:
    one, other = (read_mixture(mixture_file(folder), seed) for seed in (0, 1))
    assert texts(one, "train") != texts(other, "train")
    assert all(one[0][split] == other[0][split] for split in ("validation", *one[1]))
    assert read_mixture(mixture_file(folder), 0) == one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[test", "fix its TOML"),
        ("[test]", "test: got Dictionary should have at least 1 item"),
        ("[test.x]\ncount = 3", "test.x.data: got Field required"),
        ('[test.x]\ndata = "musique.json"\ncuont = 3', "test.x.cuont: got "),
        ('[test.train]\ndata = "musique.json"', "train: got a data set of that name"),
        ('[test.x]\ndata = "nothing.json"', "nothing.json: got No such file"),
        ('[test.x]\ndata = "musique.json"\ncount = 13', "got 13 questions wanted of musique.json, which has 12"),
    ],
)
def test_an_invalid_mixture_is_reported_in_one_line(text: str, expected: str, folder: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_mixture(mixture_file(folder, text), 0)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
