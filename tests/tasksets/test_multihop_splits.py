"""Questions are divided into splits independently of the seed, and no question is in two splits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets import build
from agent_r1.tasksets.files import SPLITS, Splits, divide, read_splits, whole_split
from agent_r1.tasksets.multihop.questions import Question, read_questions

FILE = Path("questions.json")


def questions_of(texts: list[str]) -> list[Question]:
    return [Question(f"row-{index}", text, ("x",)) for index, text in enumerate(texts)]


def texts_of(splits: Splits) -> dict[str, list[str]]:
    return {split: [question.text for question in questions] for split, questions in splits.items()}


def write(folder: Path, name: str, texts: list[str]) -> Path:
    path = folder / name
    path.write_text(json.dumps([{"question": text, "answer": "x"} for text in texts]), "utf-8")
    return path


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (3, (1, 1, 1)),
        (60, (42, 6, 12)),
        (9000, (7872, 128, 1000)),
    ],
)
def test_sizes_of_the_splits(count: int, sizes: tuple[int, int, int]) -> None:
    splits = divide(questions_of([f"q{i}" for i in range(count)]), FILE)
    assert tuple(len(splits[split]) for split in SPLITS) == sizes


@given(st.lists(st.sampled_from([f"q{i}" for i in range(12)]), min_size=3, max_size=40))
def test_equal_questions_are_in_the_same_single_split(texts: list[str]) -> None:
    if len(set(texts)) < 3:
        with pytest.raises(InvalidInput, match="give at least 3"):
            divide(questions_of(texts), FILE)
        return
    splits = divide(questions_of(texts), FILE)
    by_split = [set(texts) for texts in texts_of(splits).values()]
    assert all(by_split)
    assert not any(by_split[a] & by_split[b] for a in range(3) for b in range(a))
    ids = [question.id for split in SPLITS for question in splits[split]]
    assert sorted(ids) == sorted(f"row-{index}" for index in range(len(texts)))


def test_the_order_of_the_file_changes_nothing() -> None:
    questions = questions_of([f"q{i}" for i in range(50)])
    shuffled = random.Random(1).sample(questions, len(questions))
    assert divide(shuffled, FILE) == divide(questions, FILE)


def test_a_seed_orders_training_questions_and_keeps_the_splits(tmp_path: Path) -> None:
    path = write(tmp_path, "all.json", [f"q{i}" for i in range(50)])
    first, again, other = (texts_of(read_splits(path, seed, read_questions)) for seed in (0, 0, 1))
    assert first == again
    assert other["train"] != first["train"]
    assert {split: sorted(texts) for split, texts in other.items()} == {
        split: sorted(texts) for split, texts in first.items()
    }
    assert (other["test"], other["validation"]) == (first["test"], first["validation"])


def test_only_divided_files_have_a_split_of_all_questions(tmp_path: Path) -> None:
    write(tmp_path, "train.json", [f"q{i}" for i in range(40)])
    write(tmp_path, "test.json", ["a", "b"])
    splits = read_splits(tmp_path, 0, read_questions)
    assert whole_split(splits) is None and set(splits) == set(SPLITS)
    assert build("hotpotqa", tmp_path, passages(tmp_path), 0).whole is None


def passages(folder: Path) -> Path:
    path = folder / "passages.jsonl"
    path.write_text('{"title": "Alba", "text": "A town."}', "utf-8")
    return path


def test_a_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path, "train.json", ["a", "b"])
    (tmp_path / "test.jsonl").write_text('{"question": "c", "answer": "x"}', "utf-8")
    splits = texts_of(read_splits(tmp_path, 0, read_questions))
    assert {split: sorted(texts) for split, texts in splits.items()} == {
        "train": ["a", "b"],
        "validation": [],
        "test": ["c"],
    }


def test_a_folder_that_shares_a_question_between_splits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.json", ["a", "b"])
    write(tmp_path, "test.json", ["b"])
    with pytest.raises(InvalidInput, match="'b' in train and test"):
        read_splits(tmp_path, 0, read_questions)


def test_a_folder_with_two_files_for_a_split_or_with_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no question files"):
        read_splits(tmp_path, 0, read_questions)
    write(tmp_path, "train.json", ["a"])
    write(tmp_path, "train.jsonl", ["a"])
    with pytest.raises(InvalidInput, match="keep one of them"):
        read_splits(tmp_path, 0, read_questions)
