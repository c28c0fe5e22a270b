"""A recorder and a gate for attempts outside of a run, such as an evaluation."""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import GroupRequest


class NullRecorder:
    async def record(self, *events: Event) -> None:
        return None


async def no_gate(request: GroupRequest) -> int:
    """Let a group start at once. Return 0 as the version of the weights, which do not change outside of a run."""
    return 0
