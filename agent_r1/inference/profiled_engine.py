"""An engine that measures how long another engine, outside of this process, takes."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.inference import Capabilities, Completion, InferenceEngine, Prompt, SamplingParams
from agent_r1.core.profile import Part, Profiler
from agent_r1.core.weights import PolicyVersion, WeightUpdate


@dataclass(frozen=True, slots=True)
class ProfiledEngine:
    """An engine that does what ``engine`` does. ``profiler`` measures its generations as :attr:`Part.SERVERS`."""

    engine: InferenceEngine
    profiler: Profiler

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        with self.profiler.measure(Part.SERVERS):
            return await self.engine.generate(prompt, params, session_id=session_id)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self.engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        await self.engine.release(session_id)

    async def close(self) -> None:
        await self.engine.close()
