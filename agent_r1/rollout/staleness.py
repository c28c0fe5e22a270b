"""Staleness control: when a group is allowed to start, and how many groups each optimizer step takes."""

from __future__ import annotations

import asyncio

from agent_r1.rollout.collector import GroupRequest


class StalenessController:
    """A controller that decides when groups start, so that the staleness of each attempt is at most ``max_staleness``.

    The staleness of an attempt is the number of optimizer steps between its oldest token and the step that trains on
    the attempt. If ``max_staleness`` is 0, training is synchronous.

    Groups are numbered from 0, and each step takes the next groups in this order. A step takes ``groups_per_step``
    groups. If the algorithm's filters keep no attempt of a group, the step takes one more group (dynamic sampling:
    DAPO, arXiv:2503.14476), but at most ``(1 + refill) * groups_per_step`` groups in total. ``groups_wanted`` is the
    number of groups that the current step takes, as far as known now.

    A group is allowed to start as soon as it is certain that the current step, or one of the next ``max_staleness``
    steps, takes the group. So each group that starts is taken by a step.

    Example: a run has 4 groups per step, ``max_staleness`` 0 and ``refill`` 1. Groups 0 to 3 start immediately. If
    the filters keep no attempt of group 2, group 4 starts too. The first step takes at most 4 * (1 + 1) = 8 groups.

    Args:
        steps: the number of optimizer steps that remain.
        groups_per_step: the number of groups that a step takes if the filters keep an attempt of each.
        refill: a step takes at most ``refill * groups_per_step`` additional groups.
        taken: the number of groups that the run used before it was resumed.
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
        return self._wanted

    async def acquire(self, request: GroupRequest) -> int:
        """Wait until the group of ``request`` is allowed to start. Then return the current version of the weights.

        If the run needs no more groups, the call never returns and has to be cancelled.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: request.group_id < self._certain_groups())
        return self._version

    def _certain_groups(self) -> int:
        """Return the number of groups that are allowed to start, counted from the beginning of the run.

        The number includes the groups of all earlier steps, of the current step, and of the next ``max_staleness``
        steps.
        """
        ahead = min(self._max_staleness, self._steps_left - 1)  # -1 after the last step, so that no group starts
        return self._taken + self._wanted + ahead * self._groups_per_step

    async def request_refill(self) -> None:
        """Let the current step take one more group. Call this method if a group of the step had no training signal.

        A step takes at most ``(1 + refill) * groups_per_step`` groups. At this limit, the method changes nothing.
        """
        async with self._changed:
            self._wanted = min(self._wanted + 1, self._max_groups)
            self._changed.notify_all()

    async def on_step_end(self, version: int) -> None:
        """Begin the next step. From now on, the engine samples with the weights of version ``version``."""
        async with self._changed:
            self._taken += self._wanted
            self._wanted = self._groups_per_step
            self._steps_left -= 1
            self._version = version
            self._changed.notify_all()
