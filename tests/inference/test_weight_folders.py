"""Folders of weights for engines in other processes."""

from __future__ import annotations

import copy
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from agent_r1.core.files import LOCK
from agent_r1.inference.policy_engine import PREFIX, WeightFolders
from agent_r1.model.load import read_weights


def test_a_version_that_is_written_again_has_the_new_weights(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    with closing(WeightFolders(tmp_path, "float32", shared_memory=False)) as folders:
        folders.write(model, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        written = read_weights(folders.write(model, 3), model)
        assert all(torch.equal(written[name], weight) for name, weight in model.state_dict().items())


def test_weights_of_a_killed_run_make_room_in_shared_memory(
    tiny_model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    old = memory / f"{PREFIX}1-abc"
    old.mkdir(parents=True)
    (old / LOCK).touch()  # no process holds the lock
    monkeypatch.setattr("agent_r1.inference.policy_engine.SHARED_MEMORY", memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=0 if old.exists() else 2**40))
    with closing(WeightFolders(tmp_path, "float32")) as folders:
        assert folders.write(tiny_model, 0).is_relative_to(memory)
