"""`agent-r1 train --trainer.ranks 2`: the same run, a rank that is killed, and machines that are too small."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ForkedRank
from recorded_runs import first_attempts

from agent_r1.cli import main
from agent_r1.export.config import ExportConfig
from agent_r1.export.run import export_run
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store.manifest import list_checkpoints
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.trainer import ranks
from agent_r1.trainer.fsdp import FsdpTrainer
from agent_r1.trainer.ranks import RankGroup
from agent_r1.training.run import RANKS_RESTARTED

OPTIONS = [
    *("--steps", "2", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "1"),
    *("--pass_k", "0", "--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--quiet"),
]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[RankGroup[object]]:
    started: list[RankGroup[object]] = []
    init = RankGroup.__init__

    def start(group: RankGroup[object], *given: Any) -> None:
        init(group, *given)
        started.append(group)

    monkeypatch.setattr(ranks, "start_process", ForkedRank)
    monkeypatch.setattr(RankGroup, "__init__", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return started


def gradient_norms(folder: Path) -> list[float]:
    name = "policy_gradient_norm"
    with closing(RunReader(folder)) as reader:
        return [step.values[name] for step in reader.metrics() if name in step.values]


def tensor_files(run: Path, step: int) -> list[str]:
    """Return the files of a checkpoint that hold the state of the trainer."""
    return sorted(path.name for path in (run / "checkpoints" / f"step-{step}").glob("trainer*.safetensors"))


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text("utf-8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "alone"
    assert main(["train", *OPTIONS, "--run", str(run)]) == 0
    return run


@pytest.fixture
def kill_in(groups: list[RankGroup[object]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    call, made, killing = FsdpTrainer._call, Counter[str](), dict[str, tuple[int, ...]]()

    def kill(trainer: FsdpTrainer, method: str, *arguments: object) -> list[Any]:
        made[method] += 1
        if made[method] in killing.get(method, ()):
            os.kill(groups[-1].pids[1], signal.SIGKILL)
        return call(trainer, method, *arguments)

    monkeypatch.setattr(FsdpTrainer, "_call", kill)
    return lambda method, *calls: killing.update({method: calls})


def test_a_run_goes_on_by_itself_after_a_rank_was_killed(
    groups: list[RankGroup[object]],
    alone: Path,
    kill_in: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, engines, init = tmp_path / "run", list[TorchEngine](), TorchEngine.__init__

    def note(engine: TorchEngine, *given: Any) -> None:
        engines.append(engine)
        init(engine, *given)

    monkeypatch.setattr(TorchEngine, "__init__", note)
    kill_in("optim_step", 2)
    assert main(["train", *OPTIONS, "--run", str(run), "--trainer.ranks", "2"]) == 0
    assert len(engines) == 2  # of the policy, and of the base model in the final comparison
    assert len(groups) == 2 and not any(is_running(pid) for group in groups for pid in group.pids)
    assert verify(run).is_valid
    assert first_attempts(run) == first_attempts(alone) != []
    assert gradient_norms(run) == pytest.approx(gradient_norms(alone), rel=1e-3)
    with closing(RunReader(run)) as reader:
        fates = Counter((fate.attempt, fate.fate) for fate in reader.fates())
        restarts = [event.detail for event in reader.events() if event.kind == RANKS_RESTARTED]
    assert set(fates.values()) == {1} and len(fates) == 2 * 2 * 4  # each attempt of each step, once
    assert len(restarts) == 1 and f"(process {groups[0].pids[1]}) was killed by SIGKILL (restart 1 of 2)" in restarts[0]
    report = export_run(run, tmp_path / "model", ExportConfig(format="model", checkpoint="1"))
    assert report.facts["step"] == 1 and (tmp_path / "model" / "model.safetensors").is_file()
    assert not list((tmp_path / "model").glob("trainer*"))


def test_a_run_whose_ranks_keep_dying_ends_in_one_line_and_continues(
    groups: list[RankGroup[object]],
    alone: Path,
    kill_in: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    kill_in("save_state", 2, 3)
    assert main(["train", *OPTIONS, "--run", str(run), "--trainer.ranks", "2", "--trainer.rank_restarts", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "rank 1 of the trainer" in lines[0] and "killed by SIGKILL" in lines[0]
    assert verify(run).is_valid
    assert [folder.name for folder in list_checkpoints(run)] == ["step-1"]
    assert len(list((run / "checkpoints").glob(".state.*"))) == 1  # of the second death; the restart removed the first
    assert main(["train", "--quiet", "--resume", "--run", str(run), "--trainer.ranks", "1"]) == 0
    assert len(groups) == 2 and not any(is_running(pid) for group in groups for pid in group.pids)
    assert first_attempts(run) == first_attempts(alone) != []
    assert gradient_norms(run) == pytest.approx(gradient_norms(alone), rel=1e-3)
    assert verify(run).is_valid
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-1", "step-2"}
    assert tensor_files(run, 1) == ["trainer-00001-of-00002.safetensors", "trainer-00002-of-00002.safetensors"]
    assert tensor_files(run, 2) == ["trainer.safetensors"]
