"""A recorder that stores nothing, and a gate that lets each group start at once, for attempts outside of a run."""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import GroupRequest


class NullRecorder:
    async def record(self, *events: Event) -> None:
        return None


async def no_gate(request: GroupRequest) -> int:
    """Let a group start at once. Return 0 as the version of the weights, which do not change outside of a run."""
    return 0
