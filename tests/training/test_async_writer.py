"""Saving goes on beside training; its failure is told, once, and nothing is saved twice at the same time."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from checkpointing import snapshot_of
from transformers import PreTrainedModel

from agent_r1.core.events import CheckpointSaved, Event
from agent_r1.training.checkpoint.async_writer import Saver
from agent_r1.training.checkpoint.files import CheckpointError, Snapshot


class Heard:
    """A recorder that remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def record(self, *events: Event) -> None:
        self.events += events


@pytest.fixture
def snapshot(model: PreTrainedModel) -> Snapshot:
    return snapshot_of(1, model)


def test_the_loop_goes_on_while_a_save_is_under_way(snapshot: Snapshot) -> None:
    may_end = threading.Event()

    async def training() -> None:
        saver = Saver(lambda _: may_end.wait(10), Heard())
        saver.start(snapshot)
        await asyncio.sleep(0.05)
        may_end.set()
        await saver.settled()

    asyncio.run(training())
    assert may_end.is_set()


def test_settled_means_that_nothing_is_being_saved(snapshot: Snapshot) -> None:
    ended: list[Snapshot] = []
    heard = Heard()

    def slow(given: Snapshot) -> None:
        time.sleep(0.1)
        ended.append(given)

    async def training() -> None:
        saver = Saver(slow, heard)
        await saver.settled()
        for count in (1, 2):
            saver.start(snapshot)
            await saver.settled()
            assert len(ended) == count == len(heard.events)

    asyncio.run(training())
    assert ended == [snapshot, snapshot] and heard.events == [CheckpointSaved(1), CheckpointSaved(1)]


def full(_: Snapshot) -> None:
    raise CheckpointError("no space")


def broken(_: Snapshot) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("write", "said"), [(full, "no space"), (broken, "step 1 could not be saved: ZeroDivision")])
def test_a_failed_save_is_told_once_and_not_written_down(
    write: Callable[[Snapshot], None], said: str, snapshot: Snapshot
) -> None:
    heard = Heard()

    async def training() -> None:
        saver = Saver(write, heard)
        saver.start(snapshot)
        with pytest.raises(CheckpointError, match=said):
            await saver.settled()
        await saver.settled()

    asyncio.run(training())
    assert heard.events == []
