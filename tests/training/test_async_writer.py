"""Saving runs beside training, one save at a time, and a failure is raised once."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from checkpointing import snapshot_of
from transformers import PreTrainedModel

from agent_r1.core.events import Event
from agent_r1.training.checkpoint_files import CheckpointError, Snapshot
from agent_r1.training.checkpoint_manager import AsyncCheckpointWriter


class MemoryRecorder:
    """A recorder that keeps the events in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def record(self, *events: Event) -> None:
        self.events += events


@pytest.fixture
def snapshot(model: PreTrainedModel) -> Snapshot:
    return snapshot_of(1, model)


def test_the_event_loop_is_not_blocked_by_a_save(snapshot: Snapshot) -> None:
    may_end = threading.Event()

    async def training() -> None:
        writer = AsyncCheckpointWriter(lambda _: may_end.wait(120), MemoryRecorder())
        writer.start(snapshot)
        await asyncio.sleep(0.05)
        may_end.set()
        await writer.wait()

    asyncio.run(training())
    assert may_end.is_set()


def full(_: Snapshot) -> None:
    raise CheckpointError("no space")


def broken(_: Snapshot) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("write", "message"), [(full, "no space"), (broken, "step 1 could not be saved: ZeroDivision")]
)
def test_a_failed_save_is_raised_once_and_not_recorded(
    write: Callable[[Snapshot], None], message: str, snapshot: Snapshot
) -> None:
    recorder = MemoryRecorder()

    async def training() -> None:
        writer = AsyncCheckpointWriter(write, recorder)
        writer.start(snapshot)
        with pytest.raises(CheckpointError, match=message):
            await writer.wait()
        await writer.wait()

    asyncio.run(training())
    assert recorder.events == []
