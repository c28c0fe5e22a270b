"""What Ray is asked for, and what is refused before it is asked. These tests need no Ray."""

from __future__ import annotations

import sys
from importlib import machinery
from typing import Any

import pytest

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.cli import main
from agent_r1.core import errors as packages
from agent_r1.core.errors import InvalidInput
from agent_r1.inference.config import EngineConfig, VllmConfig
from agent_r1.trainer.config import TrainerConfig
from agent_r1.training.config import TrainConfig
from agent_r1.training.ray import ResourceRequest, _require_listener, check_resources, request_resources
from agent_r1.training.servers import Hardware

CPUS, GPUS = Hardware((), 2), Hardware(("0",), 8)


def config(device: str = "auto", ranks: int = 1, replicas: int = 0, **vllm: Any) -> TrainConfig:
    """Return the settings of a run with ``ranks`` ranks that starts ``replicas`` vLLM servers."""
    engine = EngineConfig()
    if replicas:
        engine = EngineConfig(backend="vllm", replicas=replicas, vllm=VllmConfig(python="python", **vllm))
    trainer, algorithm = TrainerConfig(ranks=ranks), build_algorithm("grpo", {})
    return TrainConfig(model="m", device=device, trainer=trainer, engine=engine, algorithm=algorithm)


def rank(cpus: float = 1.0, gpus: int = 0) -> ResourceRequest:
    return ResourceRequest("rank", cpus, gpus)


def server(cpus: float = 1.0, gpus: int = 0) -> ResourceRequest:
    return ResourceRequest("vLLM server", cpus, gpus)


@pytest.mark.parametrize(
    ("settings", "cpus", "hardware", "cluster", "requests"),
    [
        (config("cpu", 2, 2), 0.5, CPUS, {"CPU": 2.0}, [rank(0.5)] * 2 + [server(0.5)] * 2),
        (config("auto", 3), 1.0, CPUS, {"CPU": 8.0}, [rank()] * 3),
        (config("auto", 1, 2), 4.0, CPUS, {"CPU": 8.0}, [server(4.0)] * 2),
        (config("cuda", 2, 1, arguments="-tp 4"), 2.0, GPUS, {"GPU": 8.0}, [rank(2.0, 1)] * 2 + [server(2.0, 4)]),
        (config("auto", 2), 1.0, GPUS, {"GPU": 8.0}, [rank(1.0, 1)] * 2),
        (config("cpu", 2, 1, arguments="-tp 2"), 1.0, GPUS, {"GPU": 8.0}, [rank()] * 2 + [server(1.0, 2)]),
    ],
)
def test_settings_become_requests(
    settings: TrainConfig, cpus: float, hardware: Hardware, cluster: dict[str, float], requests: list[ResourceRequest]
) -> None:
    assert request_resources(settings, cpus, hardware, cluster) == requests


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(), "placement.launcher: got ray; give --trainer.ranks 2 or --engine.backend vllm"),
        (config("cpu", 2, 1, devices=("0",)), "engine.vllm.devices: got 0; leave it out: Ray chooses the GPUs"),
    ],
)
def test_settings_without_a_meaning_for_ray_are_refused(settings: TrainConfig, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        request_resources(settings, 1.0, CPUS, {"CPU": 2.0})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("requests", "nodes", "message"),
    [
        ([rank()] * 2 + [server()], [{"CPU": 2.0}], "got 3 CPU cores for 2 ranks, 1 vLLM server; give fewer trainer"),
        ([rank()] * 3, [{"CPU": 1.0}, {"CPU": 1.5}], "or a smaller placement.cpus: the Ray cluster has 2.5 CPU cores"),
        ([rank(1.0, 1)] * 2, [{"CPU": 4.0, "GPU": 1.0}], "got 2 GPUs for 2 ranks; give fewer trainer.ranks or engine"),
        ([server(1.0, 2)], [{"CPU": 9.0, "GPU": 1.0}] * 2, "got 2 GPUs for one process; give at most 1 to one process"),
        ([rank(4.0)], [{"CPU": 3.0}] * 2, "got 4 CPU cores for one process; give at most 3 to one process"),
    ],
)
def test_requests_that_ray_would_wait_for_without_end_are_refused(
    requests: list[ResourceRequest], nodes: list[dict[str, float]], message: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        check_resources(requests, nodes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--placement.cpus 2", "only with placement.launcher ray"),
        ("--placement.launcher ray --placement.host 10.0.0.5", "needs placement.address"),
        ("--placement.launcher ray --placement.host localhost", "give an IPv4 address"),
        ("--placement.launcher slurm", "placement.launcher"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--trainer.ranks", "2", *settings.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1", "no such host:6379", "127.0.0.1:99999", ":"])
def test_a_cluster_that_cannot_be_reached_is_refused_at_once(address: str) -> None:
    with pytest.raises(InvalidInput, match=r"placement\.address: got .*; give host and port of a Ray cluster"):
        _require_listener(address)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find(name: str) -> machinery.ModuleSpec | None:
        return None if name == "ray" else machinery.PathFinder.find_spec(name)

    monkeypatch.setattr(packages, "find_spec", find)
    assert main(["train", "--trainer.ranks", "2", "--placement.launcher", "ray", "--run", "new"]) == 2
    assert capsys.readouterr().err.strip().endswith("pip install 'agent-r1[ray]'")
    assert "ray" not in sys.modules
