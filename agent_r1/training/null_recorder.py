"""A recorder and a gate for attempts outside of a run.

The recorder stores nothing. A gate is a function that is awaited before a group starts. The gate of this module returns
at once.
"""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import GroupRequest


class NullRecorder:
    async def record(self, *events: Event) -> None:
        return None


async def no_gate(request: GroupRequest) -> int:
    """Return the version of the weights, without waiting: always 0, because weights do not change outside of a run."""
    return 0
