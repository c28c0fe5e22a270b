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
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.store import RunReader
from agent_r1.store.verification import verify
from agent_r1.trainer import ranks
from agent_r1.trainer.fsdp import FsdpTrainer
from agent_r1.trainer.protocol import OptimStats
from agent_r1.trainer.ranks import RankGroup
from agent_r1.training.rank_restarts import RANKS_RESTARTED

OPTIONS = [
    *("--steps", "2", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "1"),
    *("--pass_k", "0", "--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--quiet"),
]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[RankGroup[object]]:
    """All groups of ranks that a test starts."""
    started: list[RankGroup[object]] = []
    init = RankGroup.__init__

    def start(group: RankGroup[object], number: int, device: str) -> None:
        init(group, number, device)
        started.append(group)

    monkeypatch.setattr(ranks, "start_process", ForkedRank)
    monkeypatch.setattr(RankGroup, "__init__", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return started


def gradient_norms(folder: Path) -> list[float]:
    name = "policy_gradient_norm"
    with closing(RunReader(folder)) as reader:
        return [step.values[name] for step in reader.metrics() if name in step.values]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    assert main(["train", *OPTIONS, "--run", str(run)]) == 0
    return run


@pytest.fixture
def kill_in_steps(groups: list[RankGroup[object]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that names the optimizer steps, counted over all attempts, in which rank 1 is killed."""
    optim_step, taken, killing = FsdpTrainer.optim_step, list[int](), list[int]()

    def kill(trainer: FsdpTrainer, learning_rate_factor: float = 1.0) -> OptimStats:
        taken.append(1)
        if len(taken) in killing:
            os.kill(groups[-1].pids[1], signal.SIGKILL)
        return optim_step(trainer, learning_rate_factor)

    monkeypatch.setattr(FsdpTrainer, "optim_step", kill)
    return lambda *steps: killing.extend(steps)


def test_a_run_goes_on_by_itself_after_a_rank_was_killed(
    groups: list[RankGroup[object]],
    alone: Path,
    kill_in_steps: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of its second step. The engine is the one that the run began with."""
    run, engines, init = tmp_path / "run", list[TorchEngine](), TorchEngine.__init__

    def note(engine: TorchEngine, *given: Any) -> None:
        engines.append(engine)
        init(engine, *given)

    monkeypatch.setattr(TorchEngine, "__init__", note)
    kill_in_steps(2)
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


def test_a_run_whose_ranks_keep_dying_ends_in_one_line_and_continues(
    groups: list[RankGroup[object]],
    alone: Path,
    kill_in_steps: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    kill_in_steps(2, 3)
    assert main(["train", *OPTIONS, "--run", str(run), "--trainer.ranks", "2", "--trainer.rank_restarts", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "rank 1 of the trainer" in lines[0] and "killed by SIGKILL" in lines[0]
    assert verify(run).is_valid
    assert main(["train", "--quiet", "--resume", "--run", str(run), "--trainer.ranks", "1"]) == 0
    assert len(groups) == 2 and not any(is_running(pid) for group in groups for pid in group.pids)
    assert first_attempts(run) == first_attempts(alone) != []
    assert gradient_norms(run) == pytest.approx(gradient_norms(alone), rel=1e-3)
    assert verify(run).is_valid
