"""Files of mathematical problems in the benchmarks' own formats, and the errors for invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.errors import InvalidInput
from agent_r1.tasksets.files import GIVEN_OUT, read_splits
from agent_r1.tasksets.math.problems import Problem, read_problems

MATH = {"problem": "Half of 4?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
GSM8K, WORKED = "4 / 2 = <<4/2=2>>2\n#### 2", r"Well, $\boxed{2}$.The answer is: 2"


@pytest.mark.parametrize(
    ("row", "answer", "worked"),
    [
        ({"question": "Half of 4?", "answer": GSM8K}, "2", GSM8K),
        (MATH, "2", MATH["solution"]),
        (MATH | {"answer": r"\frac42"}, r"\frac42", MATH["solution"]),
        (MATH | {"answer": 2}, "2", MATH["solution"]),
        ({"question": "Half of 4?", "answer": WORKED}, "2", WORKED),
        ({"question": "Half of 4?", "answer": " 2 "}, "2", ""),
        ({"problem": "Half of 4?", "answer": 2}, "2", ""),
    ],
    ids=["GSM8K", "MATH", "MATH-500", "a number", "worked", "bare", "number"],
)
def test_the_format_is_detected_from_the_rows(
    row: Any, answer: str, worked: str, rows_file: Callable[..., Path]
) -> None:
    assert read_problems(rows_file(row)) == (Problem("row-1", "Half of 4?", answer, worked),)


def test_a_few_problems_without_an_answer_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [MATH] * 100 + [MATH | {"solution": r"It is $\boxed{}$."}]
    file = tmp_path / "math.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert len(read_problems(file)) == 100
    assert "a problem is left out" in caplog.text and "101" in caplog.text
    file.write_text("\n".join(map(json.dumps, rows[90:])), "utf-8")
    with pytest.raises(InvalidInput, match="no answer in the working"):
        read_problems(file)


def test_a_row_can_have_its_own_id(rows_file: Callable[..., Path]) -> None:
    assert [each.id for each in read_problems(rows_file(MATH | {"unique_id": "test/1.json"}))] == ["test/1.json"]


def test_maths_own_folders_are_read_file_by_file(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for subject, number in (("algebra", 1), ("algebra", 2), ("geometry", 1)):
            path = tmp_path / split / subject / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(MATH | {"problem": f"{split} {subject} {number}?"}, indent=4), "utf-8")
    splits = read_splits(tmp_path, 0, read_problems, GIVEN_OUT)
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 3, "validation": 0, "test": 3}
    assert sorted(problem.id for problem in splits["test"]) == ["algebra/1", "algebra/2", "geometry/1"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"problem": "Half of 4?", "solution": "It is 2."}], "row 1: got no answer in the working"),
        ([{"question": "Half of 4?", "answer": "It\nis 2."}], "row 1: got no answer in the working"),
        ([{"question": "Half of 4?"}], "row 1: got no answer; give every row a text under 'answer' or 'solution'"),
        ([{"answer": "2"}], "row 1: got no question"),
        ([MATH | {"unique_id": "a"}] * 2, "row 2: got the id 'a' for a second time"),
    ],
)
def test_an_invalid_row_is_reported_with_its_number(
    rows: list[Any], expected: str, rows_file: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_problems(rows_file(*rows))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_an_invalid_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no JSON files"):
        read_problems(tmp_path)
    (tmp_path / "1.json").write_text("[1]", "utf-8")
    with pytest.raises(InvalidInput, match=r"1\.json: got \[1\] \(array\)"):
        read_problems(tmp_path)


@real_data
@pytest.mark.parametrize(
    ("name", "count"), [("gsm8k_train_1000.jsonl", 1000), ("gsm8k_test_300.jsonl", 300), ("math500_250.jsonl", 250)]
)
def test_the_benchmarks_own_files_are_read(name: str, count: int) -> None:
    problems = read_problems(SHARED / name)
    assert len(problems) == count
    assert all(len(problem.answer) < 100 and "####" not in problem.answer for problem in problems)
