"""The examples run, and learn."""

import json
import runpy
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from golden_base import GOLDEN_BASE

from agent_r1.cli import main
from agent_r1.store.reader import RunReader

ROOT = Path(__file__).parents[1]


def start(monkeypatch, file, *arguments):
    """Run a program of this repository in this process, which has imported torch already."""
    monkeypatch.setattr(sys, "argv", [str(file), *arguments])
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(state)


def test_an_agent_of_twelve_lines_trains_from_its_file(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["--steps", "2", "--groups-per-step", "4", "--group-size", "4"]
    options = [*small, "--run", str(run), "--json", "--quiet"]
    assert main(["train", str(ROOT / "examples" / "ten_lines.py"), *options]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 2 and report["run"] == str(run)
    assert set(report["table"]) == {"base-tool-call", "trained"}


def test_the_whole_loop_in_one_file_learns(capsys, monkeypatch):
    start(monkeypatch, ROOT / "examples" / "own_loop.py", "--steps", "3", "--model", GOLDEN_BASE)
    ems = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(ems) == 3 and ems[-1] > ems[0] + 0.15


def test_three_environments_train_in_one_run(capsys, monkeypatch, tmp_path):
    start(monkeypatch, ROOT / "examples" / "three_environments.py", "2", str(tmp_path / "run"))
    shown = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "last 3 steps" in line]
    assert shown == ["sums", "towns", "bar"]
    with closing(RunReader(tmp_path / "run")) as reader:
        tools = {
            one.task_id.partition("/")[0]: [tool.name for tool in turn.tools]
            for one in reader.trajectories("train")
            for turn in one.turns
        }
    assert tools == {"sums": ["add"], "towns": ["search"], "bar": ["bring"]}


def test_an_algorithm_of_ones_own_trains_from_its_file(tmp_path):
    algorithm = f"{ROOT / 'examples' / 'own_algorithm.py'}:MEDIAN"
    chosen = ["--algorithm", algorithm, "--algorithm.loss.clip_high", "0.3"]
    small = {
        "steps": 2,
        "groups_per_step": 4,
        "evaluate_every": 0,
        "evaluate_n": 4,
        "pass_k": 0,
        "trainer.minibatches": 2,
    }
    options = [f"--{key}={value}" for key, value in {**small, "run": tmp_path / "run"}.items()]
    assert main(["train", *chosen, *options, "--quiet"]) == 0
    reader = RunReader(tmp_path / "run")
    assert reader.config()["algorithm"]["loss"]["clip_high"] == 0.3
    fates = {(fate.fate, fate.reason) for fate in reader.fates()}
    assert ("trained", None) in fates and fates <= {("trained", None), ("dropped", "no token has an advantage")}
    reader.close()


def test_an_agent_of_ones_own_is_trained_over_http(tmp_path):
    agent = ROOT / "examples" / "own_agent.py"
    small = {"steps": 1, "groups_per_step": 4, "group_size": 4, "evaluate_every": 0, "evaluate_n": 4, "pass_k": 0}
    options = [f"--{key}={value}" for key, value in {**small, "run": tmp_path / "run", "splits": "style-a"}.items()]
    assert main(["train", "--agent", f"{agent}:run", *options, "--quiet"]) == 0
    reader = RunReader(tmp_path / "run")
    trajectories = [reader.trajectory(event.attempt) for event in reader.attempts()]
    reader.close()
    assert {trajectory.status for trajectory in trajectories} <= {"completed", "out_of_tokens"}
    assert any([turn.parent for turn in trajectory.turns] == [None, 0] for trajectory in trajectories)


def test_a_game_of_two_is_trained_from_both_sides(capsys, monkeypatch):
    start(monkeypatch, ROOT / "examples" / "self_play.py", "2")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 1", "step 2"]


# peers_trl.py runs in an environment with TRL.
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.name != "peers_trl.py")


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda path: path.name)
def test_benchmarks_start(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    try:
        start(monkeypatch, file, "--help")
    except SystemExit as ended:
        assert not ended.code
