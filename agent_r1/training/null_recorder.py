"""Attempts that are no part of a run: evaluations, checks, and what a person plays."""

from __future__ import annotations

from agent_r1.core.events import Event
from agent_r1.rollout.collector import Order


class Unrecorded:
    """A recorder that writes nothing down."""

    async def record(self, *events: Event) -> None:
        return None


async def at_once(order: Order) -> int:
    """Groups start under the weights there are."""
    return 0
