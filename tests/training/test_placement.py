"""A run on another engine gives the same result: only the placement differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from inference.http_engine import EngineServer, HttpEngine
from recorded_runs import first_attempts

from agent_r1.config import Layer, resolve
from agent_r1.core.inference import InferenceEngine
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.tasksets import build
from agent_r1.training.build import Placement
from agent_r1.training.config import RunConfig, TrainConfig
from agent_r1.training.policy import Policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train

SMALL = {
    **{"steps": 2, "groups_per_step": 2, "group_size": 4, "evaluate_every": 0, "evaluate_n": 2, "pass_k": 0},
    **{"max_tokens": 20, "reward_weights.found": 1.0, "checkpoint_every": 1, "splits": ("style-a",)},
}


@pytest.fixture
def http_engines(tmp_path: Path) -> Iterator[Placement]:
    servers = ExitStack()

    def serve(policy: Policy, config: RunConfig) -> InferenceEngine:
        folder = tmp_path / f"served-{len(list(tmp_path.glob('served-*')))}"
        policy.model.save_pretrained(folder)
        server = servers.enter_context(EngineServer(str(folder), policy.context_length))
        return HttpEngine(server.url, policy.context_length, tmp_path)

    with servers:
        yield Placement(engine=serve)


def train_with(placement: Placement, folder: Path) -> list[object]:
    """Train; return tokens, log-probabilities and rewards of all attempts of the first step."""
    taskset = build("tinywiki", None, None, 0)
    config = resolve(TrainConfig, [Layer("test", {**SMALL, "run": str(folder)}), Layer("recipe", taskset.recipe)])
    train(config, taskset, SilentProgress(), placement)
    assert verify(folder).is_valid
    return first_attempts(folder)


def losses(folder: Path) -> list[float]:
    with closing(RunReader(folder)) as reader:
        return [step.values["policy_loss"] for step in reader.metrics() if "policy_loss" in step.values]


def test_train_runs_on_an_engine_behind_http(http_engines: Placement, tmp_path: Path) -> None:
    embedded = train_with(Placement(), tmp_path / "embedded")
    assert train_with(http_engines, tmp_path / "http") == embedded != []
    assert losses(tmp_path / "http") == losses(tmp_path / "embedded")  # the second step used the new weights
