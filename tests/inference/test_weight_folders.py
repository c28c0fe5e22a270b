"""Folders of weights for engines in other processes."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agent_r1.inference.weight_folders import WeightFolders
from agent_r1.model.load import read_weights


def test_a_version_that_is_written_again_has_the_new_weights(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    """A run that continues from a checkpoint repeats the numbers of the versions after it."""
    model = copy.deepcopy(tiny_model)
    with closing(WeightFolders(tmp_path, "float32", shared_memory=False)) as folders:
        folders.write(model, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        written = read_weights(folders.write(model, 3), model)
        assert all(torch.equal(written[name], weight) for name, weight in model.state_dict().items())
