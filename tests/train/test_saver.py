"""Saving goes on beside training; its failure is told, once, and nothing is saved twice at the same time."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from checkpointing import snapshot_of
from transformers import PreTrainedModel

from agent_r1.train.checkpoint import CheckpointError, Snapshot
from agent_r1.train.saver import Saver


@pytest.fixture
def snapshot(model: PreTrainedModel) -> Snapshot:
    return snapshot_of(1, model)


def test_the_loop_goes_on_while_a_save_is_under_way(snapshot: Snapshot) -> None:
    may_end = threading.Event()

    async def training() -> None:
        saver = Saver(lambda _: may_end.wait(10))
        saver.start(snapshot)
        await asyncio.sleep(0.05)
        may_end.set()
        await saver.settled()

    asyncio.run(training())
    assert may_end.is_set()


def test_settled_means_that_nothing_is_being_saved(snapshot: Snapshot) -> None:
    ended: list[Snapshot] = []

    def slow(given: Snapshot) -> None:
        time.sleep(0.1)
        ended.append(given)

    async def training() -> None:
        saver = Saver(slow)
        await saver.settled()
        for count in (1, 2):
            saver.start(snapshot)
            await saver.settled()
            assert len(ended) == count

    asyncio.run(training())
    assert ended == [snapshot, snapshot]


def full(_: Snapshot) -> None:
    raise CheckpointError("no space")


def broken(_: Snapshot) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("write", "error"), [(full, CheckpointError), (broken, ZeroDivisionError)])
def test_a_failed_save_is_told_once(
    write: Callable[[Snapshot], None], error: type[Exception], snapshot: Snapshot
) -> None:
    async def training() -> None:
        saver = Saver(write)
        saver.start(snapshot)
        with pytest.raises(error):
            await saver.settled()
        await saver.settled()

    asyncio.run(training())
