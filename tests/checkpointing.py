"""Shared by the tests of checkpoints: tiny models, snapshots of them, and disks that fail."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agent_r1.core.files import Disk
from agent_r1.core.trajectory import AttemptId
from agent_r1.trainer.protocol import TrainerState
from agent_r1.training.checkpoint_files import BestStep, Snapshot, TrainProgress, weights_on_cpu
from agent_r1.training.monitor import FailureRecord, MonitorState

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def make_model(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 8}
    return Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **{**sizes, **changes}))


def snapshot_of(step: int, model: PreTrainedModel, best: BestStep | None = None) -> Snapshot:
    """Return a snapshot that differs from step to step."""
    tensors = {"optimizer.step": torch.tensor(float(step)), "critic.head": torch.full((4, 2), float(step))}
    weights = {name: tensor + step for name, tensor in weights_on_cpu(model).items()}
    trainer = TrainerState(tensors, {"step": step, "policy": f"checksum {step}"})
    return Snapshot(TrainProgress(step, best=best), weights, trainer, monitor_state_of(step))


def monitor_state_of(step: int) -> MonitorState:
    """Return a monitor state with a value in every field."""
    failed = FailureRecord(AttemptId("run", "task", step, 1, 2), "reward_failed", "OSError: gone")
    proxies = ((0.1 + 0.2, math.inf),)
    return MonitorState(
        (None, failed), {"t": (failed, None)}, {"logprob_gap": step}, (0.1,), (0.2,), proxies, 3, True, {"calls": step}
    )


class Crash(BaseException):
    """The process dies: nothing is executed after it."""


class FailingDisk(Disk):
    """Raises ``error`` after ``good`` operations: before the next one, or after half of it if ``torn``.

    After a crash every operation does nothing, because the process is gone.
    """

    def __init__(self, good: int, error: BaseException, torn: bool) -> None:
        self._good, self._error, self._torn = good, error, torn
        self.done: list[str] = []
        self.gone = False

    def _fails(self, name: str) -> bool:
        self.done.append(name)
        return len(self.done) == self._good + 1

    def _do(self, name: str, whole: Callable[[], None], half: Callable[[], None]) -> None:
        if self.gone:
            return
        if not self._fails(name):
            return whole()
        if self._torn:
            half()
        self.gone = isinstance(self._error, Crash)
        raise self._error

    def make(self, folder: Path) -> None:
        self._do("make", lambda: Disk.make(self, folder), lambda: Disk.make(self, folder))

    def write(self, place: Path, put: Callable[[Path], None]) -> None:
        def half() -> None:
            put(place)
            for file in [place] if place.is_file() else place.iterdir():
                os.truncate(file, file.stat().st_size // 2)

        self._do("write", lambda: put(place), half)

    def sync(self, path: Path) -> None:
        self._do("sync", lambda: Disk.sync(self, path), lambda: None)

    def rename(self, old: Path, new: Path) -> None:
        self._do("rename", lambda: Disk.rename(self, old, new), lambda: Disk.rename(self, old, new))

    def remove(self, folder: Path) -> None:
        def half() -> None:
            for file in sorted(folder.iterdir())[::2]:
                file.unlink()

        self._do("remove", lambda: Disk.remove(self, folder), half)
