"""Staleness control: decides when a group may start, and how many groups an optimizer step takes."""

from __future__ import annotations

import asyncio

from agent_r1.rollout.collector import GroupRequest


class StalenessController:
    """Starts groups so that no attempt is trained more than ``max_staleness`` optimizer steps after its oldest token.

    Groups form one stream, ordered by ``group_id``, and each step takes the next ``groups_wanted`` of it. That is
    ``groups_per_step``, plus one for each group without a training signal, up to ``1 + refill`` times as many in total
    (dynamic sampling: DAPO, arXiv:2503.14476). Later steps take at least ``groups_per_step`` groups. A group may start
    as soon as it is certain that one of the next ``max_staleness`` steps after the current one takes it, so no group is
    sampled in vain. With ``max_staleness`` 0, training is synchronous: an extra group starts when the regular ones of
    the step are certain to be too few.

    Example: 4 groups per step, ``max_staleness`` 0, ``refill`` 1. Groups 0 to 3 start at once. If group 2 has no
    training signal, group 4 may start; if that has none either, group 5. Group 7 is the last one of this step.

    Args:
        steps: the remaining optimizer steps.
        taken: the groups that a resumed run has already used.
        version: the version of the weights that the engine serves.
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
        self._max_groups = groups_per_step * (1 + refill)
        self._steps_left = steps
        self._taken = taken
        self._wanted = groups_per_step
        self._version = version
        self._changed = asyncio.Condition()

    @property
    def groups_wanted(self) -> int:
        """The number of groups that the current step takes, including the refills requested so far."""
        return self._wanted

    async def acquire(self, request: GroupRequest) -> int:
        """Wait until the group may start, and return the version of the weights that it starts with.

        Unblocked by ``request_refill`` and ``on_step_end``. After the last step no group starts.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: request.group_id < self._certain_groups())
        return self._version

    def _certain_groups(self) -> int:
        """Return a lower bound of the groups taken up to ``max_staleness`` steps after the current step."""
        ahead = min(self._max_staleness, self._steps_left - 1)  # -1 after the last step: no group may start
        return self._taken + self._wanted + ahead * self._groups_per_step

    async def request_refill(self) -> None:
        """Let the current step take one more group, up to the limit, because a group had no training signal."""
        async with self._changed:
            self._wanted = min(self._wanted + 1, self._max_groups)
            self._changed.notify_all()

    async def on_step_end(self, version: int) -> None:
        """Finish a step that took all its groups; the engine now serves weights of ``version``."""
        async with self._changed:
            self._taken += self._wanted
            self._wanted = self._groups_per_step
            self._steps_left -= 1
            self._version = version
            self._changed.notify_all()
