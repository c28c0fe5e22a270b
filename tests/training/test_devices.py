"""Which GPUs trainer and vLLM servers take, and what is refused before a run begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_r1.algorithms.registry import build_algorithm
from agent_r1.core.errors import InvalidInput
from agent_r1.inference.config import EngineConfig, VllmConfig
from agent_r1.trainer.config import TrainerConfig
from agent_r1.training.config import TrainConfig
from agent_r1.training.servers import DevicePlan, Hardware, find_hardware, plan_devices, server_gpus

EIGHT = Hardware(tuple("01234567"), cores=64)


def config(device: str = "auto", ranks: int = 1, replicas: int = 0, **vllm: Any) -> TrainConfig:
    """Return the settings of a run with ``ranks`` ranks that starts ``replicas`` vLLM servers."""
    engine = EngineConfig()
    if replicas:
        engine = EngineConfig(backend="vllm", replicas=replicas, vllm=VllmConfig(python="python", **vllm))
    trainer = TrainerConfig(ranks=ranks)
    algorithm = build_algorithm("grpo", {})
    return TrainConfig(model="m", device=device, trainer=trainer, engine=engine, algorithm=algorithm)


@pytest.mark.parametrize(
    ("settings", "hardware", "plan"),
    [
        (config(), Hardware((), 2), DevicePlan((), ())),
        (config(), EIGHT, DevicePlan((0,), ())),
        (config("cuda:3"), EIGHT, DevicePlan((3,), ())),
        (config("cpu", 2, 2), Hardware((), 2), DevicePlan((), ())),
        (config("cpu", 1, 2), EIGHT, DevicePlan((), ((0,), (1,)))),
        (config("cuda", 4, 4), EIGHT, DevicePlan((0, 1, 2, 3), ((4,), (5,), (6,), (7,)))),
        (config("cuda:1", 1, 2), EIGHT, DevicePlan((1,), ((0,), (2,)))),
        (config("cuda", 2, 3, arguments="-tp 2"), EIGHT, DevicePlan((0, 1), ((2, 3), (4, 5), (6, 7)))),
        (
            config("cuda", 2, 1, arguments="--tensor-parallel-size=2 --pipeline-parallel-size 2", devices=("3+2+5+4",)),
            EIGHT,
            DevicePlan((0, 1), ((3, 2, 5, 4),)),
        ),
        (config("cpu", 1, 2, devices=("1", "9")), Hardware((), 2), DevicePlan((), ((1,), (9,)))),
        (
            config("cuda", 1, 1, arguments="--gpu-memory-utilization 0.4", devices=("0",)),
            Hardware(("0",), 4),
            DevicePlan((0,), ((0,),)),
        ),
    ],
)
def test_servers_share_the_gpu_of_the_trainer_only_on_request(
    settings: TrainConfig, hardware: Hardware, plan: DevicePlan
) -> None:
    assert plan_devices(settings, hardware) == plan


@pytest.mark.parametrize(
    ("settings", "hardware", "message"),
    [
        (config("cpu", 5), Hardware((), 4), "trainer.ranks: got 5; give at most 4: this machine has 4 CPU cores"),
        (config("cuda", 3), Hardware(("0", "1"), 64), "trainer.ranks: got 3; give at most 2: this machine has 2 GPUs"),
        (config("cuda:1", 2), EIGHT, "device: got cuda:1; give cuda: the 2 ranks use the first 2 GPUs"),
        (config("cuda:8"), EIGHT, "device: got cuda:8; give a number below 8: 8 GPUs are visible on this machine"),
        (config("cuda"), Hardware((), 4), "device: got cuda; use cpu or auto: torch sees no GPU on this machine"),
        (config("cuda", 4, 5), EIGHT, "got 5 vLLM servers of 1 GPU; give fewer, or fewer trainer.ranks: 8 GPUs are"),
        (config("cuda", 2, 2, devices=("1", "2")), EIGHT, "got 1,2; leave out GPU 1, which the trainer takes"),
        (config("cpu", 1, 2, devices=("1", "1")), EIGHT, "got 1,1; give each GPU to one server: GPU 1 is there twice"),
        (config("cpu", 1, 2, devices=("1", "8")), EIGHT, "got 1,8; give numbers below 8: 8 GPUs are visible"),
        (config("cpu", 1, 1, devices=("1+2",)), EIGHT, "got 1+2; give 1 per server"),
    ],
)
def test_impossible_requests_are_refused_with_numbers(settings: TrainConfig, hardware: Hardware, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        plan_devices(settings, hardware)
    assert message in str(raised.value)


def test_servers_get_the_names_of_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8a, 6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    hardware = find_hardware()
    assert hardware.gpus == ("4", "GPU-8a", "6")
    plan = plan_devices(config("cuda", 1, 1, arguments="-tp 2"), hardware)
    assert server_gpus(plan, 0, hardware) == "GPU-8a,6"
    assert str(plan) == "trainer: GPU 0, server 0: GPU 1+2"
    assert server_gpus(DevicePlan((), ()), 0, hardware) is None
    assert server_gpus(DevicePlan((), ((1, 3),)), 0, Hardware((), 1)) == "1,3"
