"""The command line of the paper's comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.cli import run_command
from research.paper.__main__ import paper

BAD_INPUT = {
    "--cell gprpo --seed 1": "--cell: got 'gprpo'; did you mean 'grpo'? there are: naive-rag,",
    "--cell grpo": "--cell: got 'grpo' without its seed; add --seed K",
    "--seed 3": "--seed: got 3 without --cell",
    "--cell grpo --seed 1 --seeds 2": "--seeds: got it and --cell; leave one out",
    "--seeds 0": "seeds (command line): got 0",
    "--jobz 1": "unknown option: got --jobz; did you mean '--jobs'?",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """``run("--seeds", "0")`` returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command(paper, arguments, "python -m research.paper")
        return (code, *capfd.readouterr())

    return call


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(line: str, run, tmp_path: Path) -> None:
    code, out, err = run(*line.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and BAD_INPUT[line] in err
    assert list(tmp_path.iterdir()) == []


def test_a_cell_runs_alone(run, tmp_path: Path) -> None:
    cell = ["--cell", "base-tool-call", "--seed", "7", "--n", "2", "--quiet"]
    (result,) = json.loads(run(*cell, "--json")[1].splitlines()[-1])["cells"]
    assert (result["method"], result["seed"], result["scores"]["style-a"]["n"]) == ("base-tool-call", 7, 2)
    assert "Base Tool" in run(*cell)[1]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["runs"], "no report is written"


def test_help_shows_every_setting(run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and out.startswith("Usage: python -m research.paper")
    assert all(f"--{name}" in out for name in ("seeds", "jobs", "cell", "seed", "steps", "n", "out", "json", "quiet"))


def test_it_is_a_module_that_imports_torch_only_to_compare() -> None:
    code = "import sys, research.paper.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
