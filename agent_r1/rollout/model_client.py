"""A frozen policy as something an environment can ask: what a user that a model plays speaks with."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from agent_r1.core.environment import ModelClient
from agent_r1.core.inference import InferenceEngine, Prompt, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.renderers.template_renderer import TemplateRenderer


def chat_client(engine: InferenceEngine, renderer: TemplateRenderer, sampling: SamplingParams) -> ModelClient:
    """Asks the model behind ``engine``. Its weights are nobody's to change: give it an engine of its own.

    The draw depends on ``sampling.seed`` and on the conversation, and on nothing else, so that an episode that is lived
    again hears the same. What is asked raises EngineError where the engine cannot answer.
    """

    async def ask(messages: tuple[Message, ...]) -> Message:
        view = renderer.render(messages, ())
        drawn = replace(sampling, stop_token_ids=renderer.stop_token_ids, seed=_seed(sampling.seed, view.text))
        completion = await engine.generate(Prompt(view.token_ids), drawn)
        return renderer.parse(completion.token_ids).message

    return ask


def _seed(root: int, text: str) -> int:
    """63 bits."""
    return int.from_bytes(hashlib.sha256(f"{root}|{text}".encode()).digest()[:8], "big") >> 1
