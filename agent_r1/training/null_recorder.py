"""A recorder that stores nothing, and a function that lets each group start without waiting.

This module is for attempts that do not belong to a run, such as the attempts of an evaluation.
"""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import GroupRequest


class NullRecorder:
    """A recorder that discards all events."""

    async def record(self, *events: Event) -> None:
        return None


async def no_gate(request: GroupRequest) -> int:
    """Let a group start at once. Return 0 as the version of the weights: outside of a run, the weights do not change.

    In a run, ``StalenessController.acquire`` takes the place of this function.
    """
    return 0
