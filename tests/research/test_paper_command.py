"""The command line of the paper's comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.cli import run_command
from research.paper.__main__ import paper

BAD_INPUT = {
    "--method gprpo --seed 1": "--method: got 'gprpo'; did you mean 'grpo'? there are: naive-rag,",
    "--method grpo": "--method: got 'grpo' without a seed; add --seed K",
    "--seed 3": "--seed: got 3 without --method",
    "--base 1": "--base: got 1 without --method; add --method NAME, or give --bases N",
    "--method grpo --seed 1 --finished true": "--finished: got it together with --method",
    "--method grpo --seed 1 --seeds 2": "--seeds: got it together with --method; leave one of them out",
    "--seeds 0": "seeds (command line): got 0",
    "--jobz 1": "unknown option: got --jobz; did you mean '--jobs'?",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command(paper, arguments, "python -m research.paper")
        return (code, *capfd.readouterr())

    return call


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_prints_one_line_and_writes_no_file(line: str, run, tmp_path: Path) -> None:
    code, out, err = run(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and BAD_INPUT[line] in err
    assert list(tmp_path.iterdir()) == []


def test_a_single_experiment_runs_without_a_report(run, tmp_path: Path) -> None:
    arguments = ["--method", "base-tool-call", "--seed", "7", "--n", "2", "--quiet"]
    (result,) = json.loads(run(*arguments, "--json")[1].splitlines()[-1])["experiments"]
    assert (result["method"], result["seed"], result["scores"]["style-a"]["n"]) == ("base-tool-call", 7, 2)
    assert "Base" in run(*arguments)[1]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["runs"], "no report is written"
