"""Tool specifications, shown to the policy, and the results of tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.core.messages import ContentPart


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for the policy. ``parameters`` is the JSON schema of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """Return the tool in the OpenAI format, for the argument ``tools`` of a chat template."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of one tool call.

    Attributes:
        parts: the text and media that the agent sees.
        error: the kind of the failure; None if the call succeeded.
        data: any value for the rewards, not shown to the agent.
        seconds: the duration of the call.
    """

    parts: tuple[ContentPart, ...]
    ok: bool
    error: str | None = None
    data: Any = None
    seconds: float = 0.0
