"""Where one part of a run is not restored it shows: the controls of exact resume."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resuming import EVERYTHING, Whole, resume, train_with_images

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.taskset import TaskSet
from agent_r1.store import Ledger
from agent_r1.store.ledger import LedgerError
from agent_r1.store.verify import verify
from agent_r1.trainer.learner import Learner, LearnerState
from agent_r1.training.checkpoint import restore

Change = Callable[[Learner, LearnerState], LearnerState]


def restoring(change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """Restore a learner from a state that ``change`` was made to."""
    whole = Learner.restore

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Learner, "restore", lambda self, state: whole(self, change(self, state)))

    return apply


def scalar(name: str, value: float) -> Callable[[pytest.MonkeyPatch], None]:
    return restoring(lambda _, state: replace(state, scalars={**state.scalars, name: value}))


def tensors(prefix: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Those of a new learner stay."""

    def mixed(learner: Learner, state: LearnerState) -> LearnerState:
        own = {name: tensor for name, tensor in learner.state().tensors.items() if name.startswith(prefix)}
        assert own
        return replace(state, tensors={**state.tensors, **own})

    return restoring(mixed)


def position(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    load = restore.load_checkpoint

    def partly(*arguments: Any) -> Any:
        saved = load(*arguments)
        return replace(saved, position=replace(saved.position, **changes))

    return lambda patch: patch.setattr(restore, "load_checkpoint", partly)


def without_weights(patch: pytest.MonkeyPatch) -> None:
    """The model stays that of the beginning, and the learner does not look."""
    patch.setattr(restore, "_weights", lambda folder, policy: policy.model.state_dict())
    restoring(lambda learner, state: replace(state, scalars={**state.scalars, "policy": learner.weights().digest}))(
        patch
    )


def new_reference(patch: pytest.MonkeyPatch) -> None:
    """The reference is the model that was saved, not the one that the run began with."""
    whole = Learner.restore

    def restored(self: Learner, state: LearnerState) -> None:
        whole(self, state)
        reference = self._models.reference
        assert reference is not None
        reference.load_state_dict(self._models.policy.state_dict())

    patch.setattr(Learner, "restore", restored)


def no_lineage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "open_lineage", lambda *_: None)


LEFT_OUT: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "weights": (without_weights, "another digest, another model"),
    "moments": (tensors("optimizer."), "another digest"),
    "step": (scalar("step", 0), "versions count up from 0"),
    "version": (scalar("version", 0), "versions count up from 0"),
    "critic": (tensors("critic."), "another digest"),
    "KL coefficient": (scalar("kl_coefficient", 0.05), "another digest"),
    "reference": (new_reference, "another digest"),
    "best": (position(best=None), "another model"),
    "groups taken": (position(groups=0), "LedgerError: attempts of whole:0.0.0:"),
    "lineage": (no_lineage, "LedgerError: attempts of whole:8.0.0:"),
}
"""What restores all but one part, and what that has to show: not any failure will do."""


def shown(run: Whole, folder: Path) -> str:
    """All that tells a run that was resumed from one that never stopped."""
    try:
        made = resume(run.world, folder)
    except LedgerError as error:
        return f"LedgerError: {error}"
    differs = {"another digest": made.digest != run.made.digest, "another model": made.model != run.made.model}
    return ", ".join([*(name for name, other in differs.items() if other), *verify(folder).violations])


@pytest.mark.parametrize("part", LEFT_OUT)
def test_where_one_part_is_not_restored_it_shows(
    part: str, whole: Callable[..., Whole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = whole(whimsical=True, **EVERYTHING)
    assert shown(run, run.stopped(4, tmp_path / "as it was")) == ""
    leave_out, expected = LEFT_OUT[part]
    leave_out(monkeypatch)
    assert expected in shown(run, run.stopped(4, tmp_path))


def test_where_random_numbers_came_from_a_generator_that_is_not_restored_it_shows(
    micro: TaskSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_process() -> None:
        generator = random.Random(0)
        monkeypatch.setattr(AttemptId, "seed", lambda *_: generator.getrandbits(63))

    new_process()
    run = Whole(micro, tmp_path, train_with_images(micro, tmp_path, {"steps": 3}))
    new_process()
    assert "another digest" in shown(run, run.stopped(2, tmp_path))
