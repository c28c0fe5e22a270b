"""A resumed run is warned and stopped at the same steps as an uninterrupted one."""

import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from resuming import resume, train_with_images

from agent_r1.core.errors import RunStopped
from agent_r1.core.taskset import TaskSet
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training import checkpoint_manager as restore
from agent_r1.training.monitor import MonitorState


class FailingScorer:
    """Every call fails."""

    async def score(self, group: Any, task: Any) -> Any:
        raise OSError("the judge is gone")


@dataclass(frozen=True, slots=True)
class Report:
    """The reports of a health monitor: warnings, the reason for a stop, and how far the run came."""

    warnings: tuple[str, ...]
    stopped: str | None
    steps: int
    attempts: int


def report_of(folder: Path, go: Callable[[], object]) -> Report:
    stopped = None
    try:
        go()
    except RunStopped as error:
        stopped = str(error).splitlines()[0]
    with closing(RunReader(folder)) as reader:
        details = [event.detail for event in reader.events() if event.kind == "warning"]
        warnings = tuple(re.sub(r"agent-r1 show \S+", "agent-r1 show RUN", detail) for detail in details)
        return Report(warnings, stopped, len(list(reader.metrics())), len(list(reader.attempts())))


CASES: dict[str, dict[str, Any]] = {
    "failures": {"monitor.failure_share": 0.9},
    "steps in a row": {"monitor.logprob_gap": 1e-12, "monitor.patience": 4},
}
STATE_FIELD = {"failures": "attempts", "steps in a row": "streaks"}
STOPPED_AFTER = {"failures": 1, "steps in a row": 2}
"""The newest checkpoint when each run is stopped for the first time."""


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_the_monitor_survives_a_stop_and_without_it_reports_differ(
    case: str, micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taskset = replace(micro, scorers=(FailingScorer(),)) if case == "failures" else micro
    without = report_of(tmp_path / "whole", lambda: train_with_images(taskset, tmp_path, CASES[case]))
    folder = tmp_path / f"step-{STOPPED_AFTER[case] + 1}"
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    resumed = report_of(folder, lambda: resume(taskset, folder))
    assert resumed == without and (without.warnings or without.stopped) and verify(folder).is_valid
    load, forgotten = restore.load_checkpoint, STATE_FIELD[case]

    def forgetful(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, monitor=replace(saved.monitor, **{forgotten: getattr(MonitorState(), forgotten)}))

    monkeypatch.setattr(restore, "load_checkpoint", forgetful)
    assert report_of(again, lambda: resume(taskset, again)) != without


FITS = 300
"""Number of tokens that fit in memory."""


def test_reduced_micro_batches_stay_reduced_after_resuming(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_pass = passes._micro_batch_pass

    def scarce(*arguments: Any) -> passes.PassStats:
        seen = one_pass(*arguments)
        if seen.num_padded_tokens > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return seen

    with patch.object(passes, "_micro_batch_pass", scarce):
        made = train_with_images(micro, tmp_path, {"steps": 3, "trainer.share_prefixes": "off"})
    again = Path(shutil.copytree(tmp_path / "step-3", tmp_path / "again"))
    assert resume(micro, tmp_path / "step-3") == made
    monkeypatch.setattr(PolicyUpdater, "load_state", forgetting(PolicyUpdater.load_state))
    assert resume(micro, again) != made


def forgetting(whole: Callable[..., None]) -> Callable[..., None]:
    def restored(updater: PolicyUpdater, state: Any) -> None:
        whole(updater, replace(state, scalars={**state.scalars, "micro_tokens": updater.micro_tokens}))

    return restored
