"""Files of the user: what is wrong is named with its type, a mark at the beginning is no fault, equal keys are one."""

import datetime

import pytest

from agent_r1.config import read_toml
from agent_r1.core.errors import InvalidInput
from agent_r1.core.files import JsonRecord, read_records
from agent_r1.tasksets.math.problems import read_problems
from agent_r1.tasksets.multihop.questions import read_questions

ODD = [
    ("null", "answer = null"),
    ('["a"]', r"answer = \['a'\] \(array\)"),
    ("true", r"answer = True \(boolean\)"),
    ('{"a": 1}', r"answer = \{'a': 1\} \(object\)"),
    ('" "', r"answer = ' ' \(string\)"),
    ("[]", r"answer = \[\] \(array\)"),
]


@pytest.mark.parametrize(("answer", "said"), ODD)
def test_an_answer_that_is_no_text_is_named(tmp_path, answer, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "Who?", "answer": {answer}}}\n', "utf-8")
    with pytest.raises(InvalidInput, match=rf"row 1: got {said}; give every row a text under 'answer'"):
        read_problems(path)
    if answer != '["a"]':
        with pytest.raises(InvalidInput, match=f"row 1: got {said}; give every row a text, or a list of texts, under"):
            read_questions(path)


def test_numbers_dates_and_missing_fields_are_named(tmp_path):
    row = JsonRecord(tmp_path, 3, {"answer": datetime.date(1984, 1, 2), "answers": 7})
    with pytest.raises(InvalidInput, match=r"row 3: got answer = datetime.date\(1984, 1, 2\) \(date\)"):
        row.get_text("answer")
    with pytest.raises(InvalidInput, match=r"got answers = 7 \(integer\); give every row a text under 'answers'"):
        row.get_text("answers")
    with pytest.raises(InvalidInput, match="got no question; give every row a text under 'question' or 'problem'"):
        row.get_text("question", "problem")


@pytest.mark.parametrize(
    "row",
    [
        '{"a": 1, "a": 1}',
        '{"a": 1, "b": 2, "a": 3}',
        '{"b": {"a": 1, "a": 2}}',
        '{"b": [{"a": 1, "a": 2}]}',
        '{"a": 1, "\\u0061": 2}',
    ],
)
@pytest.mark.parametrize("around", ["{}\n", "[{}]"])
def test_a_key_that_is_given_twice_is_refused(tmp_path, row, around):
    path = tmp_path / "rows.jsonl"
    path.write_text(around.replace("{}", row), "utf-8")
    with pytest.raises(InvalidInput, match=r"line 1: got JSON that cannot be read \(the key 'a' is given twice"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["steps = 3", "", "# only a comment", "\r\nsteps = 3\r\n", '[train]\nname = "é"'])
def test_a_byte_order_mark_is_no_fault(tmp_path, text):
    plain, marked = tmp_path / "plain.toml", tmp_path / "marked.toml"
    plain.write_bytes(text.encode())
    marked.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_toml(marked).values == read_toml(plain).values


@pytest.mark.parametrize("data", [b"\xff\xfes\x00", b"\xef\xbb\xbfa = \xff", b"a = 1\na = 2"])
def test_a_toml_file_that_cannot_be_read_is_refused(tmp_path, data):
    (tmp_path / "x.toml").write_bytes(data)
    with pytest.raises(InvalidInput, match="fix its TOML"):
        read_toml(tmp_path / "x.toml")
