"""A run with LoRA: small checkpoints, exact resume, an adapter that has to reach the engine, and two exports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from golden_base import GOLDEN_BASE
from resuming import Whole, config_of, resume
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1.cli import main
from agent_r1.config import Layer, resolve
from agent_r1.core.errors import InvalidInput, RunStopped
from agent_r1.core.inference import InferenceEngine, PolicyVersion, WeightUpdate
from agent_r1.core.taskset import TaskSet
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.adapter import trained_weights
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.model.weights import weights_checksum
from agent_r1.store.reader import RunReader
from agent_r1.store.saved_weights import find_folder
from agent_r1.store.verification import verify
from agent_r1.tasksets.tinywiki.model import TINY_BASE_FOLDER
from agent_r1.training import run
from agent_r1.training.build import Placement
from agent_r1.training.config import EvalConfig, RunConfig, TrainConfig
from agent_r1.training.evaluate import evaluate
from agent_r1.training.policy import Policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.resume import resolve_resume_config
from agent_r1.training.tables import TrainReport

LORA: dict[str, Any] = {"trainer.lora.rank": 4, "trainer.learning_rate": 1e-2}
MIXED = {"trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}


def train(taskset: TaskSet, folder: Path, placement: Placement | None = None, **settings: Any) -> TrainReport:
    return run.train(config_of(taskset, folder, {**LORA, **settings}), taskset, SilentProgress(), placement)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(40)[None]).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def gaps(folder: Path) -> list[float]:
    with closing(RunReader(folder)) as reader:
        return [step.values["logprob_gap"] for step in reader.metrics() if "logprob_gap" in step.values]


@pytest.mark.parametrize("settings", [{}, {"algorithm": {"name": "ppo", "kl.coefficient": 0.1}, "evaluate_every": 2}])
def test_a_resumed_run_equals_an_uninterrupted_one(
    settings: dict[str, Any], whole: Callable[..., Whole], tmp_path: Path
) -> None:
    uninterrupted = whole(**LORA, steps=3, **settings)
    folder = uninterrupted.stopped(1, tmp_path)
    assert resume(uninterrupted.taskset, folder) == uninterrupted.result
    assert verify(folder).is_valid


def test_checkpoints_hold_the_adapter_and_no_frozen_weight(whole: Callable[..., Whole]) -> None:
    folder = whole(**LORA, steps=3).place / "whole"
    newest = folder / "checkpoints" / "step-3"
    adapter, model = load_file(newest / "adapter_model.safetensors"), folder / "model" / "model.safetensors"
    assert not (newest / "model.safetensors").exists() and all(".lora_" in name for name in adapter)
    moments = {name for name in load_file(newest / "trainer.safetensors") if name.startswith("optimizer.")}
    assert len(moments) == 3 * len(adapter)
    assert (newest / "adapter_model.safetensors").stat().st_size < 0.2 * model.stat().st_size


def test_the_exports_compute_what_the_run_ended_with(whole: Callable[..., Whole]) -> None:
    folder = whole(**LORA, steps=3).place / "whole"
    base: Any = AutoModelForCausalLM.from_pretrained(GOLDEN_BASE, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ours = load_model(str(find_folder(str(folder))), torch.float32)
    before = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, str(folder / "model" / "adapter")))
    scale = float(adapted.abs().max())
    assert distance(adapted, before) > 0.1
    assert max(distance(adapted, logits(merged)), distance(adapted, logits(ours))) < 1e-5 * scale
    with closing(RunReader(folder)) as reader:
        assert list(reader.versions())[-1].checksum == weights_checksum(ours)


def test_eval_of_the_run_gives_its_table_again(micro: TaskSet, tmp_path: Path) -> None:
    table = train(micro, tmp_path / "run", steps=2, evaluate_n=4).table
    layers = [Layer("test", {"model": str(tmp_path / "run"), "evaluate_n": 4, "max_tokens": 20, "pass_k": 0})]
    config = resolve(EvalConfig, layers)
    again = evaluate(config, micro, SilentProgress())
    assert again.cells == table.cells
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-2")
    other = evaluate(config.model_copy(update={"model": checkpoint}), micro, SilentProgress())
    assert other.cells["base-tool-call"] == table.cells["trained"]


class Deaf(TorchEngine):
    """An engine that never loads an adapter, and reports the checksum of the weights that it has."""

    def _load_weights(self, update: WeightUpdate) -> PolicyVersion:
        assert isinstance(update.handle, torch.nn.Module)
        own = {name: tensor.clone() for name, tensor in trained_weights(self._runner.model).items()}
        served = super()._load_weights(update)
        for name, tensor in trained_weights(self._runner.model).items():
            tensor.copy_(own[name])
        return served if served.checksum is None else replace(served, checksum=weights_checksum(self._runner.model))


def deaf(policy: Policy, config: RunConfig) -> InferenceEngine:
    return Deaf(policy.model, policy.context_length, config.engine)


def test_an_adapter_that_never_reached_the_engine_is_caught_by_its_checksum(micro: TaskSet, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="weights: the engine does not serve"):
        train(micro, tmp_path / "run", Placement(engine=deaf), steps=2)


def test_without_checksums_the_gap_of_the_log_probabilities_catches_it(micro: TaskSet, tmp_path: Path) -> None:
    unchecked = {"trainer.checksum_every": 0, "trainer.learning_rate": 5e-2}
    with pytest.raises(RunStopped, match="logprob_gap: engine and trainer disagree"):
        train(micro, tmp_path / "run", Placement(engine=deaf), **unchecked)
    train(micro, tmp_path / "heard", **unchecked)  # control: the same run with an engine that loads the adapter
    assert max(gaps(tmp_path / "run")) > 0.01 > 100 * max(gaps(tmp_path / "heard"))


def test_bfloat16_rounds_the_frozen_weights_and_not_the_adapter(micro: TaskSet, tmp_path: Path) -> None:
    train(micro, tmp_path / "run", steps=1, **MIXED)
    adapter = load_file(tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in (*adapter.values(), *merged.values())} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in adapter.values())
    assert gaps(tmp_path / "run") and max(gaps(tmp_path / "run")) < 1


def test_a_run_says_how_many_weights_it_trains(whole: Callable[..., Whole]) -> None:
    with closing(RunReader(whole(**LORA, steps=3).place / "whole")) as reader:
        (detail,) = [event.detail for event in reader.events() if event.kind == "lora"]
    assert detail.startswith("rank 4: ") and detail.endswith(" weights are trained, 210,752 are frozen")


def test_a_new_run_cannot_begin_with_an_adapter(whole: Callable[..., Whole], micro: TaskSet, tmp_path: Path) -> None:
    checkpoint = whole(**LORA, steps=3).place / "whole" / "checkpoints" / "step-3"
    with pytest.raises(InvalidInput, match=r"which is an adapter; name a whole model: .* RUN/model"):
        train(micro, tmp_path / "run", model=str(checkpoint))
    folder = checkpoint.parent.parent
    with pytest.raises(InvalidInput, match=rf"or branch: .*--model {folder} --run ") as refusal:
        resolve_resume_config([Layer("test", {"run": str(folder), "trainer.learning_rate": 0.5})])
    assert find_folder(str(folder), merged=True) == str(folder / "model") and "@" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.lora.alpha": 8.0}, "have no effect without an adapter: give rank too"),
        ({"trainer.lora.rank": -1}, "trainer.lora.rank"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        resolve(TrainConfig, [Layer("test", {"model": "any", **settings})])


def test_a_head_that_cannot_write_a_call_is_refused_with_lora_and_warned_of_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As in models whose pretraining never saw the tokens of their tool format: their rows equal those of others."""
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE_FOLDER)
    tokenizer = load_tokenizer("tiny-base")
    call, other = tokenizer.convert_tokens_to_ids(["<tool_call>", "<unk>"])
    with torch.no_grad():
        model.get_output_embeddings().weight[other] = model.get_output_embeddings().weight[call] * 1.002
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["train", "--model", str(tmp_path), "--dry_run"]
    for command in (options, ["sft", "--from_solutions", "--n", "2", *options[1:]]):
        assert main([*command, "--trainer.lora.rank", "4"]) == 2
        (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("agent-r1: ")]
        assert line.startswith("agent-r1: tool_format: got hermes, whose <tool_call> has the row of 1 more tokens in")
    assert main(options) == 0
    assert "give --tool_format tags" in caplog.text
