"""A task, and what a tool reports: the values that environments, trajectories and scorers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_r1.core.messages import Message


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: the messages that open the episode and what a scorer needs, never shown to the agent.

    Example:
        Task("style-a/7", (Message.user("What is the capital of Alba?"),), {"answers": ("Bruno",)}, "train")
    """

    id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    split: str = "train"
