"""A clock that only the parts of a test advance, and the model and the tool that advance it."""

from __future__ import annotations

from dataclasses import dataclass

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@dataclass
class SimulatedClock:
    """A clock, with a model that calls the tool ``look`` once and then answers."""

    now: float = 0.0

    def read(self) -> float:
        return self.now

    def reply(self, prompt: str) -> str:
        """Generate for 1 second."""
        self.now += 1.0
        return "<answer>so</answer>" if "tool_response" in prompt else CALL

    def look(self) -> str:
        """Look for 30 seconds."""
        self.now += 30.0
        return "seen"
