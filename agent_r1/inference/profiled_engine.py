"""An engine that measures how long another engine, outside of this process, takes."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.core.inference import Completion, Prompt, SamplingParams
from agent_r1.core.profile import Part, Profiler
from agent_r1.inference.forwarding_engine import ForwardingEngine


@dataclass(frozen=True, slots=True)
class ProfiledEngine(ForwardingEngine):
    """An engine that forwards all calls to ``engine``. ``profiler`` measures generations as :attr:`Part.SERVERS`."""

    profiler: Profiler

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        with self.profiler.measure(Part.SERVERS):
            return await self.engine.generate(prompt, params, session_id=session_id)
