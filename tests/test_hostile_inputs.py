"""No option and no file ends a command in a traceback; values that no run could use are refused."""

import os
from pathlib import Path

import pytest
from hostile_options import AGENT
from preloaded import run_python

from agent_r1.cli import main
from agent_r1.core.errors import MAX_SHOWN, InvalidInput
from agent_r1.core.task import Task
from agent_r1.tasksets.math.problems import read_problems

FAULTS = Path(__file__).parent / "faults"


@pytest.mark.timeout(900)  # ten seconds on an idle core
def test_hostile_options_and_files_are_refused_in_one_line() -> None:
    done = run_python(str(FAULTS / "hostile_inputs.py"), "--short", "--seconds", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "options: " in done.stdout and "files: " in done.stdout and done.stdout.endswith("\n0 problems\n")


def test_the_fuzz_sees_what_it_looks_for() -> None:
    code = (
        "import hostile_inputs\n"
        "def broken(*arguments): raise ZeroDivisionError\n"
        "hostile_inputs.accept = broken\n"
        "raise SystemExit(hostile_inputs.main(['--short', '--kinds', 'options', '--match', 'train --quiet']))\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 1 and "raised: ZeroDivisionError" in done.stdout and "1 problems" in done.stdout, done


REFUSED: dict[str, str] = {
    "train --trainer.betas 1,2": "trainer.betas.0 (command line): got 1.0; it should be less than 1",
    f"train --seed 1{'0' * 30}": "give at most 4294967295",
    f"train --model {'x' * 5000}": "got xxxxx",
    "train --algorithm.kl.coefficient true": "algorithm.kl.coefficient (command line): got true",
    "train --config pipe": "pipe: not a regular file",
    "train --taskset hotpotqa --data zero": "zero: got not a regular file",
    "train --taskset hotpotqa --data half.json": "line 1: got half a character",
    "train long.py": "a prompt of 5000003 characters",
    "show runs/none 3.0\ud800": "attempt: got half a character, '\\ud800'; remove it",
    f"verify {'x' * 300}": "characters); give the name of a run in runs/",
    "train half.py": "id of task '\\ud800': got half a character",
}


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:50])
def test_values_that_no_run_could_use_are_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("zero").symlink_to("/dev/zero")
    Path("half.json").write_text('[{"question": "\\ud800", "answer": "Bruno"}]', "utf-8")
    Path("long.py").write_text(AGENT + "tasks = [Task('a', 'Who' + 'o' * 5_000_000, {'answers': ('me',)})]\n", "utf-8")
    Path("half.py").write_text(AGENT + "tasks = [Task('\\ud800', 'Who?')]\n", "utf-8")
    before = sorted(tmp_path.iterdir())
    assert main(line.split()) == 2
    printed = capfd.readouterr().err
    assert REFUSED[line] in printed and printed.count("\n") == 1 and len(printed) < 1000
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("answer", ["NaN", "1e999"])
def test_a_gold_answer_that_is_no_number_is_refused(answer: str, tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(f'{{"question": "What is 1 + 1?", "answer": {answer}}}\n', "utf-8")
    with pytest.raises(InvalidInput, match="row 1: got the answer"):
        read_problems(file)


@pytest.mark.parametrize("given", [(3, "Who?", None, "train"), ("a", "Who?", None, 3), ("a", "\ud800", None, "train")])
def test_a_task_whose_texts_are_no_texts_is_refused(given: tuple) -> None:
    with pytest.raises(InvalidInput, match="of task"):
        Task(*given)


def test_task_data_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidInput, match="data of task 'a': got an object of type int; give a dictionary"):
        Task("a", "Who?", 3)  # type: ignore[arg-type]


def test_an_error_shows_the_beginning_of_a_long_value() -> None:
    line = str(InvalidInput("model", got="x" * 5000, do="give another"))
    assert line.startswith("model: got xxx") and "(5000 characters); give another" in line
    assert str(InvalidInput("model", got="y" * MAX_SHOWN, do="z")) == f"model: got {'y' * MAX_SHOWN}; z"
