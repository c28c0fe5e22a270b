"""The base of engines that observe the generations of another engine and forward everything else to it."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.inference import Capabilities, InferenceEngine
from agent_r1.core.weights import PolicyVersion, WeightUpdate


@dataclass(frozen=True, slots=True)
class ForwardingEngine:
    """An engine that forwards weight updates, releases and closing to ``engine``. A subclass defines ``generate``."""

    engine: InferenceEngine

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self.engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        await self.engine.release(session_id)

    async def close(self) -> None:
        await self.engine.close()
