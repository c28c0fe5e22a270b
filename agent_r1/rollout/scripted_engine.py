"""The fake engine we ship: it says what a script says, through the real tokenizer and template."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from agent_r1.core.inference import (
    Capabilities,
    Completion,
    FinishReason,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    StopCondition,
)
from agent_r1.core.weights import PolicyVersion, WeightUpdate
from agent_r1.renderers.template_renderer import TemplateRenderer

LOGPROB = math.log(0.5)


def completion_of(renderer: TemplateRenderer, text: str, sampling: SamplingParams, version: int) -> Completion:
    """A text as if a model had sampled it, with the token that ends a turn; it stops where a model's would."""
    ids = (*renderer.encode(text), renderer.end_token_id)
    if sampling.stop_condition is not None:
        ids = _up_to(sampling.stop_condition, ids)
    kept = ids[: sampling.max_tokens]
    stop: FinishReason = "stop" if len(kept) == len(ids) else "length"
    return Completion(kept, (LOGPROB,) * len(kept), stop, (PolicyVersionSpan(0, version),))


def _up_to(ending: StopCondition, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens up to the one with which the ending is reached; all where none does."""
    count = next((count for count in range(1, len(ids)) if ending.is_met(ids[:count])), len(ids))
    return ids[:count]


class ScriptedEngine:
    """Implements core ``Engine``: ``reply(prompt text) -> text`` decides each completion.

    Every token gets the log-probability log 0.5. A reply stops where a model's would: after ``max_tokens``, or where
    the format ends it.

    Example:
        ScriptedEngine(chat, lambda prompt: "<answer>Bruno</answer>")
    """

    def __init__(self, renderer: TemplateRenderer, reply: Callable[[str], str]) -> None:
        self._renderer, self._reply = renderer, reply
        self._version = 0
        self.capabilities = Capabilities(frozenset({"shared_memory"}), deterministic=True)
        self.released: list[str] = []

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        await asyncio.sleep(0)
        text = str(self._renderer.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))
        return completion_of(self._renderer, self._reply(text), params, self._version)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        self._version = update.version.number
        return update.version

    async def release(self, session_id: str) -> None:
        self.released.append(session_id)

    async def close(self) -> None:
        """Nothing runs between two calls."""
