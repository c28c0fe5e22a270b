"""When a group may start: the one rule that makes training synchronous or not, and that refills a step."""

from __future__ import annotations

import asyncio

from agent_r1.rollout.collector import Order


class Clock:
    """Counts optimizer steps, and the groups that each takes.

    Groups are one stream, by serial number, and a step takes the next ``wanted`` of it. These are
    ``groups_per_step``, and one more for each that taught nothing, up to ``1 + refill`` times as many in all
    (dynamic sampling: DAPO, 2503.14476). How many later steps will take is not known, but none takes fewer than
    ``groups_per_step``. A group may start as soon as it is certain to be taken within the next ``max_staleness``
    steps after the one under way. So the oldest token of an attempt is at most that stale when it is trained, and
    no group is begun in vain. With ``max_staleness`` 0 training is synchronous, and an extra group starts once the
    regular ones are certain to fall short.

    Example: 4 groups per step, ``max_staleness`` 0, ``refill`` 1. Groups 0 to 3 start at once. Where group 2 teaches
    nothing, group 4 may start, and where that teaches nothing either, group 5; group 7 is the last for this step.

    A run that is resumed has ``steps`` left, has ``taken`` groups already, and acts by weights of ``version``.
    """

    def __init__(
        self,
        steps: int,
        groups_per_step: int,
        *,
        max_staleness: int = 0,
        refill: int = 0,
        taken: int = 0,
        version: int = 0,
    ) -> None:
        self._groups_per_step, self._max_staleness = groups_per_step, max_staleness
        self._most = groups_per_step * (1 + refill)
        self._left = steps
        self._taken = taken
        self._wanted = groups_per_step
        self._version = version
        self._changed = asyncio.Condition()

    @property
    def wanted(self) -> int:
        """How many groups the step under way takes, as far as is known."""
        return self._wanted

    async def permit(self, order: Order) -> int:
        """Wait until the group may start; the version of the weights it starts under.

        Unblocked by: ``miss``, ``advance``. After the last step nothing starts any more.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: order.serial < self._certain())
        return self._version

    def _certain(self) -> int:
        """How many groups are taken, at the least, by this step and the ``max_staleness`` steps after it."""
        ahead = min(self._max_staleness, self._left - 1)  # -1 after the last step: nothing is wanted any more
        return self._taken + self._wanted + ahead * self._groups_per_step

    async def miss(self) -> None:
        """A group of the step under way taught nothing: the step takes one more, if it may."""
        async with self._changed:
            self._wanted = min(self._wanted + 1, self._most)
            self._changed.notify_all()

    async def advance(self, version: int) -> None:
        """One more step was taken, with all the groups it wanted; the engine now uses weights of ``version``."""
        async with self._changed:
            self._taken += self._wanted
            self._wanted = self._groups_per_step
            self._left -= 1
            self._version = version
            self._changed.notify_all()
