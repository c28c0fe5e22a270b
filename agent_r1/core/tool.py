"""What a policy is told about a tool, and what a tool reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.core.messages import ContentPart


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a policy is told of a tool. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The ``tools=`` entry that chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What happened when one tool ran. ``data`` is for rewards and never shown to the agent."""

    parts: tuple[ContentPart, ...]
    ok: bool
    error: str | None = None
    data: Any = None
    seconds: float = 0.0
