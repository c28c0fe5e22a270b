"""Question and passage files are read in their own formats; errors name the file and the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import SHARED, real_data

from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.retrieval.retriever import Passage, read_corpus
from agent_r1.tasksets.multihop.questions import Question, read_questions

OFFICIAL = {
    "_id": "5a7a",
    "question": "Who leads the party of X?",
    "answer": "Ann Lee",
    "type": "bridge",
    "level": "medium",
    "supporting_facts": [["X", 0], ["Y party", 1], ["X", 2]],
    "context": [
        ["X", ["X is a politician.", " X is of the Y party."]],
        ["Y party", ["The Y party is led by Ann Lee."]],
    ],
}


def json_file(folder: Path, rows: Any, name: str = "data.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def jsonl_file(folder: Path, *lines: Any, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


# ---- the three formats


def test_the_format_of_hotpotqa(tmp_path: Path) -> None:
    (question,) = read_questions(json_file(tmp_path, [OFFICIAL]))
    assert question == Question(
        "5a7a",
        "Who leads the party of X?",
        ("Ann Lee",),
        supporting=("X", "Y party"),
        context=(
            Passage("X", "X is a politician. X is of the Y party."),
            Passage("Y party", "The Y party is led by Ann Lee."),
        ),
    )


def test_an_id_is_optional(tmp_path: Path) -> None:
    rows = [{key: value for key, value in OFFICIAL.items() if key != "_id"}] * 2
    assert [question.id for question in read_questions(json_file(tmp_path, rows))] == ["row-1", "row-2"]


def test_lines_of_question_and_answer(tmp_path: Path) -> None:
    lines = (
        {"question": " Is A b? ", "answer": "yes", "type": "comparison"},
        "",
        {"question": "Who?", "answer": "Zoë"},
    )
    assert read_questions(jsonl_file(tmp_path, *lines)) == (
        Question("row-1", "Is A b?", ("yes",)),
        Question("row-3", "Who?", ("Zoë",)),
    )


def test_all_answers_of_a_list_are_kept(tmp_path: Path) -> None:
    rows = [{"Question": "Where?", "source": "2wiki", "id": "2wiki_6", "answer": ["Poland", "Polska"]}]
    assert read_questions(json_file(tmp_path, rows)) == (Question("2wiki_6", "Where?", ("Poland", "Polska")),)


def test_the_content_of_a_file_decides_its_format(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path, OFFICIAL, name="data.json")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # the byte order mark that some editors write
    assert read_questions(path)[0].id == "5a7a"
    assert read_questions(json_file(tmp_path, [OFFICIAL], "data.jsonl"))[0].id == "5a7a"


def test_a_question_becomes_a_task_with_hidden_answers() -> None:
    question = Question("7", "Who?", ("Ann", "Ann Lee"), ("X",), (Passage("X", "x"),))
    data = {"answers": ("Ann", "Ann Lee"), "supporting": ("X",), "hops": ()}
    assert question.task("test") == Task("test/7", (Message.user("Who?"),), data, "test")


# ---- invalid files


GOOD = {"question": "Who?", "answer": "Ann"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "Who?"}, "no answer"),
        ({"question": "Who?", "answer": None}, "answer = null"),
        ({"question": "Who?", "answer": " "}, "answer = ' ' (string)"),
        ({"question": "Who?", "answer": []}, "answer = [] (array)"),
        ({"question": "Who?", "answer": ["Ann", ""]}, "answer = ['Ann', ''] (array)"),
        ({"question": "Who?", "answer": 3}, "answer = 3 (integer)"),
        ({"answer": "Ann"}, "no question"),
        ({"question": "", "answer": "Ann"}, "question = '' (string)"),
        ({"question": ["Who?"], "answer": "Ann"}, "question = ['Who?'] (array)"),
        (["Who?", "Ann"], "['Who?', 'Ann'] (array)"),
        (GOOD | {"context": "none"}, "context: Input should be a valid list"),
        (GOOD | {"supporting_facts": [["X", "first"]]}, "supporting_facts.0.1: Input should be a valid integer"),
    ],
)
def test_an_invalid_row_is_reported(row: Any, expected: str, tmp_path: Path) -> None:
    path = jsonl_file(tmp_path, GOOD, GOOD, row, GOOD)
    with pytest.raises(InvalidInput) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}, row 3: got {expected}")
    assert "\n" not in str(caught.value)


def test_a_duplicate_id_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"row 2: got the id '5a7a' for a second time"):
        read_questions(json_file(tmp_path, [OFFICIAL, OFFICIAL]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "got an empty file"),
        (b"[]", "got an empty file"),
        (b'{"question": "Who?", "answer": "Ann"}\n{"question": "Wh', "line 2: got broken JSON"),
        (b'{"question": "Who?", "answer": "Ann"}\n{"question"\n{"question": "Who?"}', "line 2: got broken JSON"),
        (b'[\n{"question": "Who?", "answer": "Ann"},\n{"question" "Who?"}\n]', "line 3: got broken JSON"),
        (b"Who?,Ann\n", "line 1: got broken JSON"),
        ('{"question": "Who?", "answer": "Zoë"}'.encode("latin-1"), "line 1: got bytes that are not UTF-8"),
        ('[\n{"question": "Who?",\n"answer": "Zoë"}]'.encode("latin-1"), "line 3: got bytes that are not UTF-8"),
        (b"[" * 100_000, "line 1: got "),
        (b'"text"', "row 1: got 'text' (string)"),
    ],
)
@pytest.mark.parametrize("read", [read_questions, read_corpus])
def test_an_invalid_file_is_reported_with_its_line(content: bytes, expected: str, read: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    if read is read_corpus:
        path.write_bytes(content.replace(b"question", b"title").replace(b"answer", b"text"))
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_questions, read_corpus])
def test_a_path_without_a_file_is_reported(read: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InvalidInput, match="give the path of a readable file"):
            read(path)


# ---- passages


def test_passages_have_a_title_and_a_text(tmp_path: Path) -> None:
    path = jsonl_file(tmp_path, {"title": "X", "text": "An X."}, {"title": "Y", "text": "A Y.", "id": 3})
    assert read_corpus(path) == (Passage("X", "An X."), Passage("Y", "A Y."))


@pytest.mark.parametrize(
    ("row", "expected"),
    [({"title": "X"}, "no text"), ({"text": "x"}, "no title"), ({"title": 1, "text": "x"}, "title = 1 .integer.")],
)
def test_an_invalid_passage_is_reported(row: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"row 2: got {expected}"):
        read_corpus(jsonl_file(tmp_path, {"title": "X", "text": "x"}, row))


# ---- the benchmarks' own files


@real_data
@pytest.mark.parametrize(
    ("name", "rows", "supporting"),
    [
        ("hotpotqa_train_60.json", 60, True),
        ("hotpotqa_dev_500.jsonl", 500, False),
        ("2wiki_250.json", 250, False),
        ("musique_250.json", 250, False),
    ],
)
def test_the_benchmarks_questions_are_read(name: str, rows: int, supporting: bool) -> None:
    questions = read_questions(SHARED / name)
    assert len(questions) == rows
    assert all((len(question.supporting) == 2) == supporting for question in questions)
    assert all(bool(question.context) == supporting for question in questions)


@real_data
@pytest.mark.parametrize(("name", "rows"), [("hotpotqa_corpus.jsonl", 994), ("2wiki_corpus.jsonl", 6119)])
def test_the_benchmarks_passages_are_read(name: str, rows: int) -> None:
    assert len(read_corpus(SHARED / name)) == rows
