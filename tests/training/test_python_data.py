"""Runs, tables and task files in Python: DataFrames, texts, and errors in the words of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from shown_runs import HOSTILE, write_run

import agent_r1
from agent_r1 import InvalidInput, Task, ToolEnv, Trainer, exact_match, load_run, tasks_from_jsonl
from agent_r1.core import errors
from agent_r1.store.reader import RunReader
from agent_r1.training.tables import Cell, Table, TrainReport

CELL = Cell(em=0.5, f1=0.75, n=4, low=0.25, high=0.75)
TABLE = Table({"base": {"a<b": None}, "trained": {"a<b": CELL, "two": CELL}}, {})
ENV = ToolEnv(tools=[], rewards=[exact_match])


def test_the_frames_of_a_run_hold_what_its_reader_reads(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    folder = tmp_path / "run"
    write_run(folder, text=HOSTILE)
    run = load_run(folder)
    metrics, attempts = run.metrics(), run.attempts()
    with closing(RunReader(folder)) as reader:
        assert {name: dict(metrics[name].dropna()) for name in ("reward", "reward/em")} == {
            name: dict(reader.curve(name)) for name in ("reward", "reward/em")
        }
        assert list(attempts.index) == [str(event.attempt) for event in reader.attempts()]
        trajectories = {str(one.attempt): one for one in reader.trajectories()}
    scored = attempts[attempts["status"] == "completed"]
    assert len(scored) > 0 and set(attempts["task"]) == {one.attempt.task for one in trajectories.values()}
    for name, row in scored.iterrows():
        found = float(sum(sum(call.values()) for turn in trajectories[str(name)].turns for call in turn.call_rewards))
        assert (row["reward/em"], row["reward/found"]) == (trajectories[str(name)].rewards["em"], found)
    assert run.attempt(str(attempts.index[3])) == trajectories[str(attempts.index[3])]
    with pytest.raises(InvalidInput, match="from the index of attempts"):
        run.attempt("nobody")


def test_a_table_is_printed_shown_and_converted(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    report = TrainReport(tmp_path / "run", 3, 1.5, TABLE)
    for text in (str(TABLE), str(report)):
        assert "trained" in text and "0.50 (0.25-0.75)" in text and "all failed" in text and "a<b" in text
    assert "3 steps in 1.5 s" in str(report) and "\x1b" not in str(report)
    assert "a&lt;b" in TABLE._repr_html_() and report._repr_html_().startswith("<pre>")
    frame = TABLE.to_pandas().set_index(["method", "split"])
    assert frame.loc[("trained", "two"), "em"] == 0.5 and pandas.isna(frame.loc[("base", "a<b"), "em"])


def test_a_table_is_plain_text_also_without_rows_or_where_colors_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Table({}, {})).split()[-2:] == ["questions:", "none"] and "failed" in str(Table({"a": {"b": None}}, {}))
    plain = str(TABLE)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(TABLE) == plain and "\x1b" not in TABLE._repr_html_()


def test_attempts_that_a_run_adds_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    write_run(tmp_path / "run")
    before, listed = load_run(tmp_path / "run").attempts(), RunReader.list_attempts
    monkeypatch.setattr(RunReader, "list_attempts", lambda *given, **more: listed(*given, **more)[:1])
    assert list(load_run(tmp_path / "run").attempts().index) == list(before.index)[:1]


def test_without_pandas_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"extra pandas: got .*; pip install 'agent-r1\[pandas\]'"):
        TABLE.to_pandas()
    with pytest.raises(InvalidInput, match="holds no run; give a name in runs/"):
        load_run(tmp_path)


def test_reading_a_run_loads_no_torch() -> None:
    code = "import sys, agent_r1; agent_r1.load_run; print('torch' in sys.modules, 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "False False"


def test_rows_become_tasks_with_answers_and_equal_questions_in_one_split(tmp_path: Path) -> None:
    rows = [{"q": f"Who is {n // 2}?", "a": [str(n), n] if n % 2 else f" x{n} ", "hops": n} for n in range(20)]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tasks = tasks_from_jsonl(file, question="q", answer="a", validation=0.3)
    assert [task.id for task in tasks] == [f"own/{n}" for n in range(1, 21)]
    assert (tasks[4].data["answers"], tasks[5].data["answers"]) == (("x4",), ("5", "5"))
    assert tasks[4].data["hops"] == 4 and tasks[4].messages[-1].text == "Who is 2?"
    splits = [task.split for task in tasks]
    assert splits[::2] == splits[1::2] and splits.count("validation") == 6
    file.write_text("\n".join(map(json.dumps, reversed(rows))), "utf-8")
    again = tasks_from_jsonl(file, question="q", answer="a", validation=0.3)
    assert [task.split for task in again] == splits[::-1]
    assert {task.split for task in tasks_from_jsonl(file, "q", "a", validation=0)} == {"train"}
    three = [task.split for task in tasks_from_jsonl(file, "q", "a", validation=0.2, test=0.01)]
    assert (three.count("test"), three.count("validation")) == (2, 4) and three[::2] == three[1::2]
    with pytest.raises(InvalidInput, match="together below 1"):
        tasks_from_jsonl(file, "q", "a", validation=0.5, test=0.5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?"}, "row 2: got no answer; give every row a text, a number, or a list"),
        ({"question": "Who?", "answer": True}, "row 2: got answer = True"),
        ({"question": "Who?", "answer": []}, "row 2: got answer = "),
        ({"question": "Who?", "answer": ["x", " "]}, "row 2: got answer = "),
        ({"question": " ", "answer": "x"}, "row 2: got question = ' '"),
        ({"question": "who?", "answer": "x"}, "got 1 different questions; give more, or validation=0"),
    ],
)
def test_a_row_that_is_no_question_is_one_line(row: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, ({"question": "Who?", "answer": "x"}, row))), "utf-8")
    with pytest.raises(InvalidInput) as caught:
        tasks_from_jsonl(file)
    assert message in str(caught.value)


def test_errors_in_python_speak_python(tmp_path: Path) -> None:
    tasks = [Task("0", "Say x.", {"answers": ("x",)})]
    write_run(tmp_path / "run")
    told = {
        r"give another run=\.\., or resume=True": lambda: Trainer(ENV, tasks, run=str(tmp_path / "run")).train(),
        r'name the run to continue, as run="NAME"': lambda: Trainer(ENV, tasks).train(resume=True),
        r"give it to train\(\), or call agent_r1.resume\(run\)": lambda: Trainer(ENV, tasks, resume=True),
        r"holds no run; leave resume out": lambda: agent_r1.resume(tmp_path / "none"),
    }
    for message, call in told.items():
        with pytest.raises(InvalidInput, match=message):
            call()


def test_a_public_name_of_another_module_is_found() -> None:
    with pytest.raises(ImportError, match=r"from agent_r1\.training\.config import TrainConfig"):
        from agent_r1 import TrainConfig  # noqa: F401
    assert not hasattr(agent_r1, "no_such_name") and not hasattr(agent_r1, "__wrapped__")
    from agent_r1 import web

    assert web.__name__ == "agent_r1.web"
