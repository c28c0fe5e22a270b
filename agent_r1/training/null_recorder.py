"""Attempts that belong to no run: evaluations, checks and human play."""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import GroupRequest


class NullRecorder:
    """A recorder that discards all events."""

    async def record(self, *events: Event) -> None:
        return None


async def no_gate(request: GroupRequest) -> int:
    """Return version 0 at once: groups start with the current weights, without waiting for an update."""
    return 0
