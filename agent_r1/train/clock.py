"""When a group may start: the one rule that makes training synchronous or not."""

from __future__ import annotations

import asyncio

from agent_r1.rollout.collector import Order


class Clock:
    """Counts optimizer steps and lets groups start no more than ``max_staleness`` steps ahead of their update.

    Group ``serial`` is consumed by step ``serial // groups_per_step``. It may start once at most
    ``max_staleness`` updates are missing before that step, so the oldest token of an attempt is at most
    that stale when it is trained. 0 is synchronous training.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self._done = 0
        self._version = 0
        self._changed = asyncio.Condition()

    async def permit(self, order: Order) -> int:
        """Wait until the group may start; the version of the weights it starts under.

        Unblocked by: ``advance``.
        """
        earliest = order.serial // self._groups_per_step - self._max_staleness
        async with self._changed:
            await self._changed.wait_for(lambda: self._done >= earliest)
        return self._version

    async def advance(self, version: int) -> None:
        """One more step was taken, and the engine now uses weights of ``version``."""
        async with self._changed:
            self._done += 1
            self._version = version
            self._changed.notify_all()
