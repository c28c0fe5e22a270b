"""`agent-r1 train` runs on another engine: only the placement differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from inference.http_engine import EngineServer, HttpEngine
from recorded_runs import first_attempts

from agent_r1.cli import main
from agent_r1.core.inference import InferenceEngine
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training import build
from agent_r1.training.build import EMBEDDED, Placement
from agent_r1.training.config import RunConfig
from agent_r1.training.policy import Policy

OPTIONS = [
    *("--steps", "2", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "2"),
    *("--pass_k", "0", "--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--quiet"),
]


@pytest.fixture
def http_engines(tmp_path: Path) -> Iterator[Placement]:
    """A placement whose engines are servers on loopback, which load their model from a folder."""
    servers = ExitStack()

    def serve(policy: Policy, config: RunConfig) -> InferenceEngine:
        folder = tmp_path / f"served-{len(list(tmp_path.glob('served-*')))}"
        policy.model.save_pretrained(folder)
        server = servers.enter_context(EngineServer(str(folder), policy.context_length))
        return HttpEngine(server.url, policy.context_length)

    with servers:
        yield Placement(engine=serve)


def train_with(placement: Placement, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Train by the command line; return tokens, log-probabilities and rewards of all attempts of the first step."""
    monkeypatch.setattr(build, "EMBEDDED", placement)
    assert main(["train", *OPTIONS, "--run", str(folder)]) == 0
    assert verify(folder).is_valid
    return first_attempts(folder)


def losses(folder: Path) -> list[float]:
    with closing(RunReader(folder)) as reader:
        return [step.values["policy_loss"] for step in reader.metrics() if "policy_loss" in step.values]


def test_train_runs_on_an_engine_behind_http(
    http_engines: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded = train_with(EMBEDDED, tmp_path / "embedded", monkeypatch)
    assert train_with(http_engines, tmp_path / "http", monkeypatch) == embedded != []
    assert losses(tmp_path / "http") == losses(tmp_path / "embedded")  # the second step used the new weights
