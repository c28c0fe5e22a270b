"""What a run leaves beside its ledger: checkpoints that it can be continued from, and the proof that all holds."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_r1.algorithms.registry import build_row
from agent_r1.config import Layer, resolve
from agent_r1.core.taskset import TaskSet
from agent_r1.store import RunReader
from agent_r1.store.digest import run_digest
from agent_r1.store.manifest import check_whole, checkpoints, step_of
from agent_r1.store.verify import verify
from agent_r1.tasksets import build
from agent_r1.trainer.learner import Learner
from agent_r1.training.build import open_policy
from agent_r1.training.checkpoint import manager as keeper
from agent_r1.training.checkpoint.files import CheckpointError, load_checkpoint, newest_whole
from agent_r1.training.config import TrainConfig
from agent_r1.training.report import Silence
from agent_r1.training.run import train

SMALL = {"steps": 4, "groups_per_step": 4, "group_size": 4, "evaluate_n": 4, "pass_k": 0, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def world() -> TaskSet:
    return build("tinywiki", None, None, 0)


def config_of(world: TaskSet, folder: Path, **changes: Any) -> TrainConfig:
    layers = [Layer("test", {**SMALL, "run": str(folder), **changes}), Layer("recipe", world.recipe)]
    return resolve(TrainConfig, layers)


@pytest.fixture(scope="module")
def run(world: TaskSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config_of(world, tmp_path_factory.mktemp("kept") / "run"), world, Silence()).run


def test_a_run_proves_itself(run: Path) -> None:
    verdict = verify(run)
    assert verdict.violations == () and verdict.steps == 4 and verdict.checkpoints >= 2
    assert Counter(verdict.attempts).total() == 4 * 4 * 4 and verdict.attempts["pending"] == 0


def test_the_ledger_knows_the_weights_of_every_version(run: Path) -> None:
    with closing(RunReader(run)) as reader:
        made = list(reader.versions())
    assert [one.version for one in made] == list(range(len(made))) and made[0].step == 0
    assert len({one.digest for one in made}) == len(made) > 2
    assert check_whole(run / "model").identity.weights in {one.digest for one in made}


def test_metrics_hold_no_clock_and_costs_nothing_else(run: Path) -> None:
    with closing(RunReader(run)) as reader:
        exact, everything = list(reader.exact_metrics()), list(reader.metrics())
    for one, more in zip(exact, everything, strict=True):
        assert {name for name in more.values if "second" in name} == more.values.keys() - one.values.keys()
        assert {"reward", "em"} <= one.values.keys()


def test_equal_seeds_have_equal_digests_whatever_the_run_is_called(world: TaskSet, run: Path, tmp_path: Path) -> None:
    digests = []
    for name, changes in (("again", {}), ("other seed", {"seed": 1})):
        train(config_of(world, tmp_path / name, **changes), world, Silence())
        with closing(RunReader(tmp_path / name)) as reader:
            digests.append(run_digest(reader))
    with closing(RunReader(run)) as reader:
        assert digests[0] == run_digest(reader) != digests[1]


def test_training_can_go_on_from_the_newest_checkpoint(world: TaskSet, run: Path) -> None:
    found = newest_whole(run)
    assert found.folder is not None and step_of(found.folder) == 4 and found.skipped == ()
    config = config_of(world, run).model_copy(update={"model": str(found.folder)})
    policy = open_policy(config, world)
    kept = load_checkpoint(found.folder, policy.model, policy.tokenizer)
    learner = Learner(
        policy.model, build_row("grpo", {}), config.learner, temperature=1.0, reward_weights={}, seed=config.seed
    )
    learner.restore(kept.learner)
    with closing(RunReader(run)) as reader:
        last = list(reader.versions())[-1]
    assert (learner.weights().version, learner.weights().digest) == (last.version, last.digest)


def test_the_best_by_validation_is_among_the_checkpoints(world: TaskSet, run: Path) -> None:
    folder = newest_whole(run).folder
    assert folder is not None
    best = json.loads((folder / "position.json").read_text())["best"]
    with closing(RunReader(run)) as reader:
        validated = {m.step: m.values["validation_em"] for m in reader.metrics() if "validation_em" in m.values}
    assert best["em"] == max(validated.values()) == validated[best["step"]]
    assert best["step"] in [step_of(path) for path in checkpoints(run)]
    kept = check_whole(run / "checkpoints" / f"step-{best['step']}").identity
    assert kept.weights == check_whole(run / "model").identity.weights


def test_no_checkpoints_where_none_are_wanted(world: TaskSet, tmp_path: Path) -> None:
    folder = train(config_of(world, tmp_path / "run", steps=1, checkpoint_every=0), world, Silence()).run
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model", "run.db"]


def test_a_save_that_fails_stops_the_run_in_one_line_and_the_model_is_still_saved(
    world: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, *_: object) -> None:
        raise CheckpointError("step-1 could not be written: No space left on device")

    monkeypatch.setattr(keeper, "save_checkpoint", full)
    config = config_of(world, tmp_path / "run", steps=1, checkpoint_every=1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(config, world, Silence())
    assert check_whole(tmp_path / "run" / "model")
    with closing(RunReader(tmp_path / "run")) as reader:
        _, event = reader.events()
    assert event.kind == "stopped" and "No space left" in event.detail and verify(tmp_path / "run").holds


FULL_DISK = """
import resource, signal, sys
from agent_r1.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))
sys.exit(main(sys.argv[1:]))
"""


def test_files_that_cannot_grow_end_the_run_in_one_line(tmp_path: Path) -> None:
    """The learner's state is larger than the limit, the model and the ledger are not."""
    arguments = ["train", "--run", str(tmp_path / "run"), "--quiet", "--checkpoint_every", "1"]
    small = [f"--{name}={value}" for name, value in {**SMALL, "steps": 2, "evaluate_n": 2}.items()][:-1]
    ended = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *arguments, *small], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "step-1 could not be written" in ended.stderr
    assert verify(tmp_path / "run").holds and list((tmp_path / "run" / "checkpoints").iterdir()) == []
