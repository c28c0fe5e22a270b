"""A new run begins with the weights of another one, which it records; the defaults belong to the weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import agent_r1
from agent_r1 import InvalidInput, load_run
from agent_r1.cli import main
from agent_r1.store.folder import create_run
from agent_r1.store.manifest import read_manifest
from agent_r1.store.reader import RunReader, read_results
from agent_r1.store.saved_weights import find_folder
from agent_r1.training.config import TrainConfig
from agent_r1.training.progress import SilentProgress

FILE = """
from agent_r1 import Task, ToolEnv, exact_match

env = ToolEnv(tools=[], rewards=[exact_match])
tasks = [Task(str(n), "Say x.", {"answers": ("x",)}, split=split) for n, split in enumerate(("train", "validation"))]
"""
SMALL = ("--groups_per_step=1", "--max_tokens=2", "--monitor.patience=9", "--evaluate_n=1", "--quiet")
OWN = ("--steps=3", "--group_size=2", "--checkpoint_every=1", "--checkpoint_keep=3", "--trainer.learning_rate=0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a folder with the file of an agent, and a run of three steps of this agent."""
    place = tmp_path_factory.mktemp("branches")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name in ("agent.py", "other.py"):
            Path(name).write_text(FILE, "utf-8")
        assert main(["train", "agent.py", "--run=own", *SMALL, *OWN]) == 0
        yield place


def test_a_branch_has_the_weights_and_the_settings_of_its_parent_and_names_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "agent.py", "--run=own", "--resume", "--trainer.learning_rate=0.5"]) == 2
    refusal = capsys.readouterr().err.strip()
    command = "agent-r1 train agent.py --model own@3 --run own-2 --trainer.learning_rate 0.5"
    assert refusal.endswith(f"; or branch: {command}")
    command = command.replace("own@3", "own@2")  # not the last step, so that another step would be seen
    assert main([*command.split()[1:], "--steps=1", "--evaluate_n=0", "--quiet"]) == 0
    with closing(RunReader(Path("runs/own-2"))) as reader:
        config, first = reader.config(), next(reader.versions())
        (parent,) = read_results(reader, "parent")
    saved = read_manifest(Path("runs/own/checkpoints/step-2")).fingerprint.weights
    assert parent == {"run": str(folder / "runs" / "own"), "step": 2, "weights": saved} and first.checksum == saved
    assert (config["model"], config["steps"]) == (str(folder / "runs/own/checkpoints/step-2"), 1)
    assert (config["trainer"]["learning_rate"], config["group_size"], config["max_tokens"]) == (0.5, 2, 2)
    capsys.readouterr()
    assert main(["show", "own-2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "parent" in shown and f"step 2 (weights {saved[:12]}..)" in shown


def test_a_model_of_a_run_has_the_defaults_of_the_weights_it_began_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/own/model", "copied", dirs_exist_ok=True)
    found = {}
    for file, model in (("other.py", "tiny-base"), ("other.py", "copied"), ("other.py", "own@1"), ("agent.py", "own")):
        assert main(["train", file, "--model", model, "--dry_run", "--json", "--run=new"]) == 0, model
        printed = capsys.readouterr()
        settings = json.loads(printed.out.splitlines()[-1])["settings"]
        found[model] = {key: value for key, value in settings.items() if key not in ("model", "taskset", "run")}
        assert ("own" in model) == ("settings" in printed.err)
    assert found["copied"] == found["own@1"] == found["tiny-base"] != found["own"]  # another task set: weights alone
    assert (found["tiny-base"]["trainer.learning_rate"], found["own"]["trainer.learning_rate"]) == (3e-4, 0.01)
    assert not Path("runs/new").exists()


def test_weights_of_a_step_are_evaluated_and_a_step_without_weights_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "agent.py", "--model=own@1", "--evaluate_n=1", "--tasks", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["table"]) == ["base-tool-call", "trained"]
    for method, result in zip(found["table"], found["tasks"], strict=True):
        assert (result["method"], result["split"], result["task"], result["failure"]) == (method, "train", "0", None)
        em = found["table"][method]["train"]["em"]
        assert (result["em"], result["rewards"], result["status"]) == (em, {"exact_match": em}, "out_of_tokens")
        assert result["answer"]
    assert main(["eval", "agent.py", "--model=tiny-base", "--max_tokens=2", "--tasks", "--quiet"]) == 0
    assert re.search(r"train +0 +base-tool-call +0\.00", capsys.readouterr().out)
    assert find_folder("own") == "runs/own/model" and find_folder("runs/own@2") == "runs/own/checkpoints/step-2"
    assert find_folder("none@2") == "none@2"
    for command in (["train", "agent.py", "--run=new"], ["eval", "agent.py"]):
        assert main([*command, "--model=own@7"]) == 2
        assert "weights: got 7 of runs/own, which has no such weights; " in capsys.readouterr().err
    shutil.copytree("runs/own", "runs/damaged", dirs_exist_ok=True)
    Path("runs/damaged/model/config.json").write_text("{}", "utf-8")
    assert find_folder("damaged") == "runs/damaged/checkpoints/step-3"
    with pytest.raises(InvalidInput, match="there are: 1, 2, 3"):
        find_folder("damaged@4")


def test_a_branch_is_continued_from_another_folder_after_its_parent_went_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/own", tmp_path / "runs" / "parent")
    shutil.copytree("runs/own/model", tmp_path / "copied")
    agent = str(folder / "agent.py")
    monkeypatch.chdir(tmp_path)
    starts = {"child": "parent@2", "path": "runs/parent/checkpoints/step-1", "plain": "copied"}
    for name, model in starts.items():
        assert main(["train", agent, "--model", model, "--run", name, "--steps=1", "--group_size=2", *SMALL]) == 0
    assert main(["train", agent, "--run=parent", "--resume", "--steps=6", "--checkpoint_keep=1", "--quiet"]) == 0
    kept = {path.name for path in Path("runs/parent/checkpoints").glob("step-*")}
    assert main(["verify", "parent"]) == 0
    assert kept & {"step-1", "step-2", "step-3"} <= {"step-1", "step-2"} < kept  # and the best one
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    for name in starts:
        run = str(tmp_path / "runs" / name)
        assert main(["train", agent, "--run", run, "--resume", "--steps=2", "--quiet"]) == 0, capsys.readouterr().err
        assert main(["eval", agent, "--model", run, "--evaluate_n=1", "--quiet"]) == 0
    shutil.rmtree(tmp_path / "runs" / "parent" / "checkpoints" / "step-2")
    capsys.readouterr()
    assert main(["train", agent, "--run", str(tmp_path / "runs" / "child"), "--resume", "--steps=3", "--quiet"]) == 2
    lost = capsys.readouterr().err
    assert "checkpoints/step-2, a folder that does not exist" in lost and lost.count("\n") == 1


def test_a_run_of_the_command_line_continues_in_python(folder: Path) -> None:
    report = agent_r1.resume("own", steps=4, progress=SilentProgress())
    assert (report.run, report.steps, report.resumed_from) == (Path("runs/own"), 4, 3)
    assert list(load_run("own").metrics().index) == [1, 2, 3, 4]
    create_run(Path("runs/python"), TrainConfig(taskset="custom", model="tiny-base").model_dump(mode="json")).close()
    with pytest.raises(InvalidInput, match=r"give them: agent_r1\.train\(env, tasks, run='python', resume=True\)"):
        agent_r1.resume("python")
