"""A renderer that measures the time of another renderer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.core.inference import StopCondition
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.profile import Part, Profiler
from agent_r1.renderers.protocol import RenderedPrompt, Renderer

Tools = tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class ProfiledRenderer:
    """A renderer that forwards all calls to ``renderer``. ``profiler`` measures the calls as :attr:`Part.RENDERING`.

    The time of a stop condition is not measured here, because it is already measured as a part of sampling.
    """

    renderer: Renderer
    profiler: Profiler

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.renderer.stop_token_ids

    def stop_condition(self, tools: Tools) -> StopCondition | None:
        return self.renderer.stop_condition(tools)

    def render(self, messages: tuple[Message, ...], tools: Tools = ()) -> RenderedPrompt:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.render(messages, tools)

    def bridge_to_next_turn(
        self,
        prompt: RenderedPrompt,
        messages: tuple[Message, ...],
        action: Action,
        action_ids: tuple[int, ...],
        observation: tuple[Message, ...],
        tools: Tools = (),
    ) -> RenderedPrompt | None:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.bridge_to_next_turn(prompt, messages, action, action_ids, observation, tools)

    def parse(self, action_ids: tuple[int, ...], turn: int = 0, tools: Tools = ()) -> Action:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.parse(action_ids, turn, tools)

    def parse_text(self, text: str, turn: int = 0, tools: Tools = ()) -> Action:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.parse_text(text, turn, tools)

    def decode(self, ids: Sequence[int]) -> str:
        return self.renderer.decode(ids)

    def call_ends(self, action_ids: tuple[int, ...], tools: Tools = ()) -> tuple[int, ...]:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.call_ends(action_ids, tools)

    def action_length(self, sampled_ids: tuple[int, ...], tools: Tools) -> int:
        with self.profiler.measure(Part.RENDERING):
            return self.renderer.action_length(sampled_ids, tools)

    def spoken_text(self, action: Action, tools: Tools) -> str:
        return self.renderer.spoken_text(action, tools)
