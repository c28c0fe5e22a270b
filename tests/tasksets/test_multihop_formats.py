"""The three benchmarks' published files are read completely; aliases of an answer count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.retrieval.retriever import Passage
from agent_r1.tasksets.multihop.questions import Question, read_questions

MUSIQUE: dict[str, Any] = {
    "id": "2hop__460946_294723",
    "paragraphs": [
        {"idx": 0, "title": "Green (album)", "paragraph_text": "Green is by Stefan Hill.", "is_supporting": True},
        {"idx": 1, "title": "Red", "paragraph_text": "Red is a colour.", "is_supporting": False},
        {"idx": 2, "title": "Stefan Hill", "paragraph_text": "He married Mika Gira.", "is_supporting": True},
    ],
    "question": "Who is the spouse of the Green performer?",
    "question_decomposition": [
        {"id": 460946, "question": "Green >> performer", "answer": "Stefan Hill", "paragraph_support_idx": 0},
        {"id": 294723, "question": "#1 >> spouse", "answer": "Mika Gira", "paragraph_support_idx": 2},
    ],
    "answer": "Mika Gira",
    "answer_aliases": ["M. Gira", "Mika Gira"],
    "answerable": True,
}

TWO_WIKI: dict[str, Any] = {
    "_id": "8813f87c",
    "type": "compositional",
    "question": "Who is the mother of the director of film X?",
    "context": [["X", ["X is by Xaver.", " It is long."]], ["Xaver", ["His mother is Malga."]]],
    "supporting_facts": [["X", 0], ["Xaver", 0]],
    "evidences": [["X", "director", "Xaver"], ["Xaver", "mother", "Malga"]],
    "evidences_id": [["Q1", "director", "Q2"], ["Q2", "mother", "Q3"]],
    "answer": "Malga",
    "answer_id": "Q3",
    "entity_ids": "Q1_Q2",
}

ALIASES = [
    {"Q_id": "Q2", "aliases": ["Xaverius"], "demonyms": []},
    {"Q_id": "Q3", "aliases": ["Malga B.", "Malga"], "demonyms": ["Malgan"]},
]


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


# ---- MuSiQue


def test_musique(tmp_path: Path) -> None:
    (question,) = read_questions(lines(tmp_path / "musique_ans_v1.0_dev.jsonl", MUSIQUE))
    assert question == Question(
        "2hop__460946_294723",
        "Who is the spouse of the Green performer?",
        ("Mika Gira", "M. Gira"),
        supporting=("Green (album)", "Stefan Hill"),
        context=(
            Passage("Green (album)", "Green is by Stefan Hill."),
            Passage("Red", "Red is a colour."),
            Passage("Stefan Hill", "He married Mika Gira."),
        ),
        hops=("Stefan Hill", "Mika Gira"),
    )


def test_only_answerable_questions_of_musique_are_used(tmp_path: Path) -> None:
    twin = MUSIQUE | {
        "answerable": False,
        "paragraphs": MUSIQUE["paragraphs"][1:],
    }  # as in the original, the same id occurs twice
    for rows in ([MUSIQUE, twin], [twin, MUSIQUE]):
        (question,) = read_questions(lines(tmp_path / "full.jsonl", *rows))
        assert len(question.context) == 3
    with pytest.raises(InvalidInput, match="got no answerable question"):
        read_questions(lines(tmp_path / "full.jsonl", twin))


# ---- 2WikiMultihopQA


def test_2wiki_with_its_alias_file(tmp_path: Path) -> None:
    lines(tmp_path / "id_aliases.json", *ALIASES)
    (tmp_path / "dev.json").write_text(json.dumps([TWO_WIKI]), "utf-8")
    (question,) = read_questions(tmp_path / "dev.json")
    assert question.answers == ("Malga", "Malga B.", "Malgan")
    assert question.supporting == ("X", "Xaver")
    assert question.hops == ("Xaver", "Malga")
    assert question.context[0] == Passage("X", "X is by Xaver. It is long.")


def test_2wiki_without_its_alias_file_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(tmp_path / "dev.json", TWO_WIKI)
    assert read_questions(path)[0].answers == ("Malga",)
    assert "id_aliases.json" in caplog.text
    caplog.clear()
    old = {key: value for key, value in TWO_WIKI.items() if not key.endswith("_id") or key == "_id"}
    read_questions(lines(tmp_path / "dev.json", old))
    assert caplog.text == ""


# ---- HotpotQA and the hub's forms


@pytest.mark.parametrize("facts", [[["X", 0], ["Y", 1]], {"title": ["X", "Y"], "sent_id": [0, 1]}])
@pytest.mark.parametrize(
    "context", [[["X", ["One.", " Two."]], ["Y", []]], {"title": ["X", "Y"], "sentences": [["One.", " Two."], []]}]
)
def test_hotpotqa_in_pairs_and_in_columns(facts: Any, context: Any, tmp_path: Path) -> None:
    row = {"id": "5a", "question": "Who?", "answer": "Ann", "supporting_facts": facts, "context": context}
    (question,) = read_questions(lines(tmp_path / "data.jsonl", row))
    assert question.supporting == ("X", "Y")
    assert question.context == (Passage("X", "One. Two."), Passage("Y", ""))


@pytest.mark.parametrize(
    "row",
    [
        {"query": "Who?", "answers": ["Ann", "A."], "query_id": "7"},
        {"question": "Who?", "golden_answers": ["Ann", "A."], "id": "7"},
        {"Question": "Who?", "answer": ["Ann", "A.", "Ann"], "id": 7},
    ],
)
def test_other_field_names_are_read(row: dict[str, Any], tmp_path: Path) -> None:
    assert read_questions(lines(tmp_path / "data.jsonl", row)) == (Question("7", "Who?", ("Ann", "A.")),)


# ---- invalid input


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (MUSIQUE | {"paragraphs": [{"title": "X"}]}, "paragraphs.0.paragraph_text: Field required"),
        (MUSIQUE | {"answer": None}, "answer = null"),
        (TWO_WIKI | {"evidences": [["X", "director"]]}, "evidences.0.2: Field required"),
        (TWO_WIKI | {"context": {"title": ["X"], "sentences": []}}, "context: Input should be a valid list"),
    ],
)
def test_an_invalid_row_is_reported(row: dict[str, Any], expected: str, tmp_path: Path) -> None:
    good = {"question": "Who?", "answer": "Ann"}
    path = lines(tmp_path / "data.jsonl", good, row)
    with pytest.raises(InvalidInput) as caught:
        read_questions(path)
    assert str(caught.value).startswith(f"{path}, row 2: got {expected}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("row", [{"aliases": []}, {"Q_id": "Q3", "aliases": "Malga"}, {"Q_id": "Q3", "demonyms": [3]}])
def test_an_invalid_row_of_aliases_is_reported(row: dict[str, Any], tmp_path: Path) -> None:
    path = lines(tmp_path / "id_aliases.json", ALIASES[0], row)
    with pytest.raises(InvalidInput) as caught:
        read_questions(lines(tmp_path / "dev.json", TWO_WIKI))
    assert str(caught.value).startswith(f"{path}, row 2: got ")
