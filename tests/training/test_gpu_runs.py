"""Runs on a GPU: engine and trainer agree, runs repeat and resume, and memory that runs out is handled.

These tests need a GPU (make test-gpu).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs_gpu
from micro_run import result_of
from resuming import config_of, resume
from scenarios import MICRO, micro_taskset

from agent_r1.core.errors import InvalidInput
from agent_r1.model.load import load_model
from agent_r1.model.weights import weights_checksum
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import build, run
from agent_r1.training.progress import SilentProgress, StepReport

pytestmark = needs_gpu
GPU = "cuda"

BFLOAT16: Mapping[str, Any] = {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}
PRECISIONS: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "float32": ({}, 1e-3),
    "tf32": ({"tf32": True}, 0.5),
    "bfloat16": (BFLOAT16, 0.5),
    "mixed": ({"engine.dtype": "bfloat16"}, 0.5),
    "lora": ({"trainer.lora.rank": 4}, 1e-3),
    "no sharing": ({"trainer.share_prefixes": "off"}, 1e-3),
    "checkpointing": ({"trainer.activation_checkpointing": True}, 1e-3),
    "ppo": ({"algorithm": "ppo"}, 1e-3),
    "kl": ({"algorithm": {"name": "grpo", "kl.coefficient": 0.05}}, 1e-3),
}
"""Settings, and the largest gap between log-probabilities of engine and trainer."""


def train(folder: Path, settings: Mapping[str, Any]) -> Path:
    taskset = micro_taskset()
    run.train(config_of(taskset, folder, {"steps": 3, "device": GPU, **settings}), taskset, SilentProgress())
    return folder


@pytest.mark.parametrize("name", PRECISIONS)
def test_engine_and_trainer_agree(name: str, tmp_path: Path) -> None:
    settings, limit = PRECISIONS[name]
    folder = train(tmp_path / "run", settings)
    assert verify(folder).is_valid
    with closing(RunReader(folder)) as reader:
        gaps = reader.curve("logprob_gap")
    assert len(gaps) == 3 and max(gaps.values()) <= limit


def test_a_model_trained_on_a_gpu_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", {})
    trained, start = (load_model(str(one), torch.float32) for one in (folder / "model", MICRO["model"]))
    assert weights_checksum(trained) != weights_checksum(start)
    assert all(bool(parameter.isfinite().all()) for parameter in trained.parameters())


@pytest.mark.parametrize("settings", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_two_runs_on_a_gpu_are_equal(settings: Mapping[str, Any], tmp_path: Path) -> None:
    assert result_of(train(tmp_path / "one", settings)) == result_of(train(tmp_path / "two", settings))


class CopyAfter(SilentProgress):
    """Progress that copies the run's folder after step 2, as a kill at this moment would leave it."""

    def __init__(self, folder: Path, to: Path) -> None:
        self._folder, self._to = folder, to

    def on_step(self, report: StepReport) -> None:
        if report.step == 2:
            shutil.copytree(self._folder, self._to)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_on_a_gpu_equals_an_uninterrupted_one(algorithm: str, tmp_path: Path) -> None:
    taskset, whole, stopped = micro_taskset(), tmp_path / "whole", tmp_path / "stopped"
    config = config_of(taskset, whole, {"steps": 4, "device": GPU, "algorithm": algorithm})
    run.train(config, taskset, CopyAfter(whole, stopped))
    assert resume(taskset, stopped) == result_of(whole)
    assert verify(stopped).is_valid


def test_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_memory", lambda device: 32 * 2**20)
    with pytest.raises(InvalidInput, match=r"memory: got .* free, but at least"):
        train(tmp_path / "run", {})
