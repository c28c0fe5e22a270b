"""What the tests of engines share."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from engine_fixtures import tiny_model  # noqa: F401
from transformers import PreTrainedModel

from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.inference.policy_engine import WeightFolders, write_weights


@pytest.fixture(scope="package")
def versions(
    tiny_model: PreTrainedModel,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[WeightUpdate]]:
    folders = WeightFolders(tmp_path_factory.mktemp("weights"), "float32", tied=False, shared_memory=False)
    model = copy.deepcopy(tiny_model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    torch.manual_seed(0)
    updates = []
    for number in range(2):
        updates.append(write_weights(folders, model, PolicyVersion(number, step=number), adapters=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.5e-5 * torch.randn_like(parameter))
    yield updates
    folders.close()
