"""A run that is resumed is warned and stopped where it would have been, had it not stopped before."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from resuming import Whole, made_by, resume, train_with_images

from agent_r1.core.errors import RunStopped
from agent_r1.core.taskset import TaskSet
from agent_r1.store import RunReader
from agent_r1.store.verification import verify
from agent_r1.trainer import forward_backward as passes
from agent_r1.trainer.learner import Learner
from agent_r1.training.checkpoint import restore
from agent_r1.training.monitor.state import MonitorState


class Refusing:
    """Nothing can be scored."""

    async def score(self, group: Any, task: Any) -> Any:
        raise OSError("the judge is gone")


@dataclass(frozen=True, slots=True)
class Looked:
    """What a doctor said of a run: its warnings, why it stopped it, and how far that run had come."""

    warnings: tuple[str, ...]
    stopped: str | None
    steps: int
    attempts: int


def looked(folder: Path, go: Callable[[], object]) -> Looked:
    stopped = None
    try:
        go()
    except RunStopped as error:
        stopped = str(error).splitlines()[0]
    with closing(RunReader(folder)) as reader:
        warnings = tuple(event.detail for event in reader.events() if event.kind == "warning")
        return Looked(warnings, stopped, len(list(reader.metrics())), len(list(reader.attempts())))


CASES: dict[str, dict[str, Any]] = {
    "failures": {"monitor.failure_share": 0.9},
    "steps in a row": {"monitor.logprob_gap": 1e-12, "monitor.patience": 4},
}
REMEMBERED = {"failures": "breaker", "steps in a row": "in_a_row"}
STOPPED_AFTER = {"failures": 1, "steps in a row": 2}
"""Where each run is stopped first, by the newest checkpoint then."""


def both(case: str, taskset: TaskSet, place: Path) -> tuple[Looked, Looked]:
    """What is said of a run without a stop, and of one that is resumed."""
    taskset = replace(taskset, scorers=(Refusing(),)) if case == "failures" else taskset
    folder = place / f"step-{STOPPED_AFTER[case] + 1}"
    without = looked(place / "whole", lambda: train_with_images(taskset, place, CASES[case]))
    return without, looked(folder, lambda: resume(taskset, folder))


@pytest.mark.parametrize("case", CASES)
def test_what_a_doctor_remembers_survives_a_stop(case: str, micro: TaskSet, tmp_path: Path) -> None:
    without, resumed = both(case, micro, tmp_path)
    assert resumed == without and (without.warnings or without.stopped)
    assert verify(tmp_path / f"step-{STOPPED_AFTER[case] + 1}").is_valid


@pytest.mark.parametrize("case", CASES)
def test_where_a_doctor_forgets_it_shows(
    case: str, micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, forgotten = restore.load_checkpoint, REMEMBERED[case]

    def forgetful(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, doctor=replace(saved.doctor, **{forgotten: getattr(MonitorState(), forgotten)}))

    monkeypatch.setattr(restore, "load_checkpoint", forgetful)
    without, resumed = both(case, micro, tmp_path)
    assert resumed != without


def test_the_doctor_counts_groups_by_itself(
    whole: Callable[..., Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, load = whole(algorithm="grpo"), restore.load_checkpoint

    def ahead(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, position=replace(saved.position, groups=saved.position.groups + 1))

    monkeypatch.setattr(restore, "load_checkpoint", ahead)
    with pytest.raises(RunStopped, match="a group is not what was asked for"):
        resume(run.taskset, run.stopped(8, tmp_path))


FITS = 300
"""Tokens of a pass that fit."""


@pytest.mark.parametrize("restored", [True, False])
def test_passes_stay_as_small_as_they_had_to_become(
    restored: bool, micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order are other bits: without the smaller passes the weights are not the same."""
    learn = passes._learn

    def scarce(*arguments: Any) -> passes.PassStats:
        seen = learn(*arguments)
        if seen.padded > FITS:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return seen

    with patch.object(passes, "_learn", scarce):
        made = train_with_images(micro, tmp_path, {"steps": 3})
    if not restored:
        monkeypatch.setattr(Learner, "restore", forgetting(Learner.restore))
    assert (resume(micro, tmp_path / "step-3") == made) is restored
    assert restored == (made_by(tmp_path / "whole") == made_by(tmp_path / "step-3"))


def forgetting(whole: Callable[..., None]) -> Callable[..., None]:
    def restored(learner: Learner, state: Any) -> None:
        whole(learner, replace(state, scalars={**state.scalars, "micro_tokens": learner.micro_tokens}))

    return restored
