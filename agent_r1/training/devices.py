"""The GPUs of the trainer and of each vLLM server of a run."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from agent_r1.core.errors import InvalidInput
from agent_r1.core.events import LogEvent
from agent_r1.inference.config import EngineConfig
from agent_r1.store.results import result_event
from agent_r1.training.config import RunConfig, TrainSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"

PARALLEL = r"(?:--(?:tensor|pipeline|data)[-_]parallel[-_]size|-tp|-pp|-dp)"
"""A regular expression for vLLM's options with a parallel size. The product of the sizes is the number of
GPUs of a server."""

MEMORY_SHARE = r"(?<!\S)--gpu[-_]memory[-_]utilization[ =]"
"""A regular expression for the option that lets a vLLM server share a GPU with the trainer."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices that this process can use.

    Attributes:
        gpus: the name of each GPU as in ``CUDA_VISIBLE_DEVICES``. ``gpus[k]`` is ``cuda:k`` in this process.
        cores: the number of CPU cores.

    Example:
        Hardware(gpus=("4", "5"), cores=16)  # if CUDA_VISIBLE_DEVICES is 4,5
    """

    gpus: tuple[str, ...]
    cores: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The GPUs of a run, by torch's index in this process.

    Attributes:
        trainer: one GPU for each rank of the trainer; () on a CPU. The embedded engine uses the first of these GPUs.
        servers: the GPUs of each vLLM server; () if the servers see all GPUs.
    """

    trainer: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        named = [("trainer", self.trainer), *((f"server {k}", gpus) for k, gpus in enumerate(self.servers))]
        return ", ".join(f"{name}: GPU {_join(gpus)}" for name, gpus in named if gpus)


def find_hardware() -> Hardware:
    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    gpus = names[:count] if len(names) >= count else map(str, range(count))
    return Hardware(tuple(gpus), os.cpu_count() or 1)


def hardware_event() -> LogEvent:
    """Return an event with the processor, CPU cores, GPUs and torch version of this machine."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = {
        "processor": processor_name(),
        "cores": find_hardware().cores,
        "gpus": gpus,
        "torch": str(torch.__version__),
    }
    return result_event("hardware", found)


def processor_name() -> str:
    """Return the name of this machine's processor, or "unknown"."""
    try:
        names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def plan_devices(config: RunConfig, hardware: Hardware) -> DevicePlan:
    """Return the GPUs of the trainer and of the vLLM servers.

    Without ``engine.vllm.devices``, the servers get GPUs that the trainer does not use.

    Raise InvalidInput if a GPU does not exist or is needed twice, if there are too few GPUs or CPU cores, or if
    ``engine.vllm.devices`` gives a server another number of GPUs than it needs. One exception: the GPUs in
    ``engine.vllm.devices`` may also be GPUs of the trainer if the servers have the option
    ``--gpu-memory-utilization``.
    """
    trainer = _trainer_gpus(config, hardware)
    engine, count = config.engine, len(hardware.gpus)
    if engine.backend != "vllm" or engine.vllm.urls:
        return DevicePlan(trainer, ())
    size = gpus_per_server(engine)
    if engine.vllm.devices:
        servers = tuple(_parse(engine.vllm.devices))
        _check_servers(config, servers, trainer, size, count)
        return DevicePlan(trainer, servers)
    if not count:
        return DevicePlan((), ())
    left = [gpu for gpu in range(count) if gpu not in trainer]
    if engine.replicas * size > len(left):
        got = f"{engine.replicas} vLLM servers of {size} GPU{'s' * (size > 1)}"
        do = f"give fewer, or fewer trainer.ranks: {count} GPUs are visible, and the trainer takes {len(trainer)}"
        raise InvalidInput("engine.replicas", got=got, do=do)
    return DevicePlan(trainer, tuple(tuple(left[k * size : (k + 1) * size]) for k in range(engine.replicas)))


def server_gpus(plan: DevicePlan, number: int, hardware: Hardware) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` for a vLLM server; None if the server sees all GPUs.

    The argument ``number`` is the index of the server. The first server has the index 0.
    """
    if not plan.servers:
        return None
    # if this process has no GPUs (torch for CPUs), it does not know their names: use the numbers
    return ",".join(hardware.gpus[gpu] if hardware.gpus else str(gpu) for gpu in plan.servers[number])


def gpus_per_server(engine: EngineConfig) -> int:
    """Return the number of GPUs that a vLLM server needs: the product of its parallel sizes in ``vllm.arguments``."""
    words = " ".join(shlex.split(engine.vllm.arguments))
    return prod(int(size) for size in re.findall(rf"(?<!\S){PARALLEL}[ =](\d+)", words))


def _trainer_gpus(config: RunConfig, hardware: Hardware) -> tuple[int, ...]:
    ranks = config.trainer.ranks if isinstance(config, TrainSettings) else 1
    kind, _, number = config.device.partition(":")
    count = len(hardware.gpus)
    if kind == "cuda" and int(number or 0) >= count:
        do = f"give a number below {count}: {count} GPUs are visible" if count else "use cpu or auto: torch sees no GPU"
        raise InvalidInput("device", got=config.device, do=f"{do} on this machine")
    if ranks > 1 and number:
        raise InvalidInput("device", got=config.device, do=f"give cuda: the {ranks} ranks use the first {ranks} GPUs")
    uses_gpus = kind == "cuda" or (kind == "auto" and count > 0)
    available, what = (count, "GPUs") if uses_gpus else (hardware.cores, "CPU cores")
    if ranks > 1 and ranks > available:
        do = f"give at most {available}: this machine has {available} {what}, and each rank needs one"
        raise InvalidInput("trainer.ranks", got=ranks, do=do)
    if not uses_gpus:
        return ()
    return (int(number),) if number else tuple(range(ranks))


def _parse(devices: Sequence[str]) -> Iterator[tuple[int, ...]]:
    for entry in devices:
        numbers = entry.split("+")
        if not all(number.strip().isdecimal() for number in numbers):
            do = "give numbers of GPUs from 0, one entry per server: 1,2 or, with two GPUs per server, 1+2,3+4"
            raise InvalidInput("engine.vllm.devices", got=entry, do=do)
        yield tuple(int(number) for number in numbers)


def _check_servers(
    config: RunConfig, servers: Sequence[tuple[int, ...]], trainer: Sequence[int], size: int, count: int
) -> None:
    """Raise InvalidInput if the vLLM servers and the trainer cannot use their GPUs at the same time.

    ``servers`` holds the GPU indices of each server, and ``trainer`` holds the GPU indices of the trainer. ``size`` is
    the number of GPUs that a server needs. ``count`` is the number of GPUs that torch sees. If ``count`` is 0, for
    example with a torch build for CPUs only, the GPU indices are not compared with ``count``.
    """
    used = [gpu for gpus in servers for gpu in gpus]
    repeated = next((gpu for gpu in used if used.count(gpu) > 1), None)
    wrong = next((gpus for gpus in servers if len(gpus) != size), None)
    do = ""
    if repeated is not None:
        do = f"give each GPU to one server: GPU {repeated} is there twice"
    elif set(used) & set(trainer) and not re.search(MEMORY_SHARE, config.engine.vllm.arguments):
        both = min(set(used) & set(trainer))
        do = f"leave out GPU {both}, which the trainer takes, or share it: engine.vllm.arguments "
        do += "'--gpu-memory-utilization 0.4'"
    elif count and max(used) >= count:
        do = f"give numbers below {count}: {count} GPUs are visible, and CUDA_VISIBLE_DEVICES renumbers them from 0"
    elif wrong is not None:
        do = f"give {size} per server, the product of the parallel sizes in engine.vllm.arguments, not {len(wrong)}"
    if do:
        raise InvalidInput("engine.vllm.devices", got=",".join(config.engine.vllm.devices), do=do)


def _join(gpus: Sequence[int]) -> str:
    return "+".join(map(str, gpus))
