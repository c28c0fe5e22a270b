"""Engine and trainer may compute in different data types: the engine proves its weights, and the loss is corrected."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import make_model
from safetensors.torch import load_file
from scenarios import MICRO, micro_taskset
from transformers import PreTrainedModel

from agent_r1.config import Layer
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.inference.config import EngineConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.weights import weights_checksum
from agent_r1.store.reader import RunReader
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.loop import publish_weights
from agent_r1.training.progress import SilentProgress, StepReport, format_step

MIXED = {"engine.dtype": "bfloat16"}


def config_of(**settings: Any) -> TrainConfig:
    taskset = micro_taskset()
    return resolve_config(TrainConfig, [Layer("test", {**MICRO, **settings}), Layer("r", taskset.recipe)], taskset)


def update_of(model: PreTrainedModel) -> WeightUpdate:
    return WeightUpdate(PolicyVersion(3, 3, weights_checksum(model)), "shared_memory", model)


def test_an_engine_in_bfloat16_proves_that_it_serves_the_trainers_float32_weights() -> None:
    async def served(publish: bool) -> PolicyVersion:
        trained, engine = make_model(), TorchEngine(make_model(), 64, EngineConfig(dtype="bfloat16"))
        assert engine.capabilities.dtype == "bfloat16"
        update = update_of(trained)
        try:
            version = await (publish_weights(engine, update) if publish else engine.update_weights(update))
        finally:
            await engine.close()
        return replace(version, checksum="the trainer's") if version == update.version else version

    assert asyncio.run(served(True)).checksum == "the trainer's"
    assert asyncio.run(served(False)).checksum != "the trainer's"  # control: it holds other bits


def test_weights_that_an_engine_damaged_are_found_in_any_data_type() -> None:
    async def served() -> PolicyVersion:
        engine = TorchEngine(make_model(), 64, EngineConfig(dtype="bfloat16"))
        load = engine._runner.model.load_state_dict

        def damaged(state: Any) -> None:
            load({name: tensor * (1.01 if tensor.ndim > 1 else 1) for name, tensor in state.items()})

        engine._runner.model.load_state_dict = damaged  # type: ignore[assignment,method-assign]
        try:
            return await publish_weights(engine, update_of(make_model()))
        finally:
            await engine.close()

    assert asyncio.run(served()) != update_of(make_model()).version


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        ({}, None),
        ({"trainer.dtype": "bfloat16", **MIXED}, "token"),
        (MIXED, "token"),
        ({"trainer.dtype": "bfloat16"}, "token"),
        ({**MIXED, "algorithm": "gspo"}, "token"),
        ({**MIXED, "algorithm": "gspo", "algorithm.correction.level": "trajectory"}, "trajectory"),
        ({**MIXED, "algorithm": "luspo"}, "token"),
        ({**MIXED, "algorithm": "gmpo"}, "token"),
        ({**MIXED, "algorithm": "steppo"}, "token"),
        ({**MIXED, "algorithm": "dppo"}, None),  # its ratio is taken to the sampler
        ({**MIXED, "algorithm.correction": "none"}, None),
        ({**MIXED, "algorithm.correction.level": "turn"}, "turn"),
    ],
)
def test_the_loss_is_corrected_by_default_with_bfloat16(settings: Any, level: str | None) -> None:
    correction = config_of(**settings).algorithm.correction
    assert (None if correction is None else correction.level) == level


def test_a_step_shows_a_gap_that_rounding_in_float32_cannot_explain() -> None:
    def shown(gap: float) -> str:
        return format_step(StepReport(1, 0.5, None, 10.0, {"logprob_gap": gap}), 2, 1.0)

    assert "log-prob gap 0.125" in shown(0.125) and "gap" not in shown(1e-5)


def test_a_run_in_bfloat16_saves_float32_weights_and_passes_the_monitor(tmp_path: Path) -> None:
    settings = {"trainer.dtype": "bfloat16", **MIXED, "steps": 2}
    run.train(config_of(**settings, run=str(tmp_path / "run")), micro_taskset(), SilentProgress())
    with closing(RunReader(tmp_path / "run")) as reader:
        gaps = [step.values["logprob_gap"] for step in reader.metrics() if "logprob_gap" in step.values]
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert gaps and all(1e-4 < gap < 1 for gap in gaps)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
