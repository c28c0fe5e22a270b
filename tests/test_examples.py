"""The examples run, and learn."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.store import RunReader

ROOT = Path(__file__).parents[1]


def test_an_agent_of_twelve_lines_trains_from_its_file(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "agent_r1.cli", "train", str(ROOT / "examples" / "ten_lines.py")]
    options = ["--steps", "3", "--groups-per-step", "5", "--run", str(run), "--json", "--quiet"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 3 and report["run"] == str(run)
    assert set(report["table"]) == {"base-tool-call", "trained"}


def test_the_whole_loop_in_one_file_learns():
    command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), "--steps", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    ems = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(ems) == 8
    assert sum(ems[-2:]) / 2 > sum(ems[:2]) / 2 + 0.1


def test_an_algorithm_of_ones_own_trains_from_its_file(tmp_path):
    algorithm = f"{ROOT / 'examples' / 'own_algorithm.py'}:MEDIAN"
    options = ["--algorithm", algorithm, "--algorithm.loss.clip_high", "0.3"]
    command = [sys.executable, "-m", "agent_r1.cli", "train", *options]
    small = {
        "steps": 2,
        "groups_per_step": 4,
        "evaluate_every": 0,
        "evaluate_n": 4,
        "pass_k": 0,
        "trainer.minibatches": 2,
    }
    options = [f"--{key}={value}" for key, value in {**small, "run": tmp_path / "run"}.items()]
    done = subprocess.run([*command, *options, "--quiet"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reader = RunReader(tmp_path / "run")
    assert reader.config()["algorithm"]["loss"]["clip_high"] == 0.3
    assert {fate.fate for fate in reader.fates()} == {"trained"}
    reader.close()


def test_a_game_of_two_is_trained_from_both_sides():
    command = [sys.executable, "-m", "examples.self_play", "2"]  # it imports research/, which is not installed
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_start(file):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # research/ is not installed
    command = [sys.executable, str(file), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
