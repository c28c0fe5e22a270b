"""Controls of exact resume: if one part of a run is not restored, the results differ."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resuming import EVERYTHING, Whole, resume, train_with_images

from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import AttemptId
from agent_r1.store.verification import verify
from agent_r1.store.writer import RunWriteError, RunWriter
from agent_r1.trainer.protocol import TrainerState
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training import checkpoint_manager as restore

Change = Callable[[PolicyUpdater, TrainerState], TrainerState]


def restoring(change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """Load the updater's state after applying ``change`` to it."""
    load_state = PolicyUpdater.load_state

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PolicyUpdater, "load_state", lambda self, state: load_state(self, change(self, state)))

    return apply


def scalar(name: str, value: float) -> Callable[[pytest.MonkeyPatch], None]:
    return restoring(lambda _, state: replace(state, scalars={**state.scalars, name: value}))


def tensors(prefix: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Keep the tensors of a new trainer whose names begin with ``prefix``."""

    def mixed(updater: PolicyUpdater, state: TrainerState) -> TrainerState:
        own = {name: tensor for name, tensor in updater.state().tensors.items() if name.startswith(prefix)}
        assert own
        return replace(state, tensors={**state.tensors, **own})

    return restoring(mixed)


def progress(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    load = restore.load_checkpoint

    def partly(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, progress=replace(saved.progress, **changes))

    return lambda patch: patch.setattr(restore, "load_checkpoint", partly)


def without_weights(patch: pytest.MonkeyPatch) -> None:
    """Keep the initial weights, and adapt the checksum that is compared with them."""
    patch.setattr(restore, "read_weights", lambda folder, model: model.state_dict())
    restoring(
        lambda updater, state: replace(
            state, scalars={**state.scalars, "policy": updater.publish().version.checksum or ""}
        )
    )(patch)


def new_reference(patch: pytest.MonkeyPatch) -> None:
    """Use the saved model as the reference instead of the initial one."""
    load_state = SingleProcessTrainer.load_state

    def restored(self: SingleProcessTrainer, state: TrainerState) -> None:
        load_state(self, state)
        reference = self._models.reference
        assert reference is not None
        reference.load_state_dict(self._models.policy.state_dict())

    patch.setattr(SingleProcessTrainer, "load_state", restored)


def no_segment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunWriter, "open_segment", lambda *_: None)


LEFT_OUT: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "weights": (without_weights, "another digest, another model"),
    "moments": (tensors("optimizer."), "another digest"),
    "step": (scalar("step", 0), "versions count up from 0"),
    "version": (scalar("version", 0), "versions count up from 0"),
    "critic": (tensors("critic."), "another digest"),
    "KL coefficient": (scalar("kl_coefficient", 0.05), "another digest"),
    "reference": (new_reference, "another digest"),
    "best": (progress(best=None), "another model"),
    "groups taken": (progress(groups=0), "RunWriteError: whole:0.0.0:train/44: it got its fate in an earlier segment"),
    "segment": (no_segment, "RunWriteError: whole:10.0.0:train/2721: it got its fate in an earlier segment"),
}
"""Restores all but one part, and the specific failure that must follow."""


def differences(run: Whole, folder: Path) -> str:
    """Return all differences between a resumed run and the uninterrupted one."""
    try:
        made = resume(run.taskset, folder)
    except RunWriteError as error:
        return f"RunWriteError: {error}"
    differs = {"another digest": made.digest != run.result.digest, "another model": made.model != run.result.model}
    return ", ".join([*(name for name, other in differs.items() if other), *verify(folder).violations])


def test_nothing_differs_if_every_part_is_restored(whole: Callable[..., Whole], tmp_path: Path) -> None:
    run = whole(unpredictable=True, **EVERYTHING)
    assert differences(run, run.stopped(4, tmp_path)) == ""


@pytest.mark.parametrize("part", LEFT_OUT)
def test_a_part_that_is_not_restored_is_detected(
    part: str, whole: Callable[..., Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(unpredictable=True, **EVERYTHING)
    leave_out, expected = LEFT_OUT[part]
    leave_out(monkeypatch)
    assert expected in differences(run, run.stopped(5, tmp_path))


def test_random_numbers_from_a_generator_that_is_not_restored_are_detected(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_process() -> None:
        generator = random.Random(0)
        monkeypatch.setattr(AttemptId, "seed", lambda *_: generator.getrandbits(63))

    new_process()
    run = Whole(micro, tmp_path, train_with_images(micro, tmp_path, {"steps": 3}))
    new_process()
    assert "another digest" in differences(run, run.stopped(2, tmp_path))
