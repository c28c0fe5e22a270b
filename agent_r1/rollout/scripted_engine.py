"""A fake inference engine for tests: a function returns the text of each completion."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from agent_r1.core.inference import (
    Capabilities,
    Completion,
    FinishReason,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    StopCondition,
    WeightUpdate,
)
from agent_r1.renderers.template_renderer import TemplateRenderer

LOGPROB = math.log(0.5)
"""The log-probability of every token."""


def completion_of(renderer: TemplateRenderer, text: str, params: SamplingParams, version: int) -> Completion:
    """Return a completion, as if a model had generated ``text`` and then the end token.

    The completion ends early at the first token that meets the stop condition of ``params``, or after
    ``params.max_tokens`` tokens. ``version`` is the version of the weights to record.
    """
    ids = (*renderer.encode(text), renderer.end_token_id)
    if params.stop_condition is not None:
        ids = _up_to_stop(params.stop_condition, ids)
    kept = ids[: params.max_tokens]
    finish_reason: FinishReason = "stop" if len(kept) == len(ids) else "length"
    return Completion(kept, (LOGPROB,) * len(kept), finish_reason, (PolicyVersionSpan(0, version),))


def _up_to_stop(condition: StopCondition, ids: tuple[int, ...]) -> tuple[int, ...]:
    count = next((count for count in range(1, len(ids)) if condition.is_met(ids[:count])), len(ids))
    return ids[:count]


class ScriptedEngine:
    """A fake InferenceEngine for tests: ``reply(prompt)`` returns the text of the completion for the text of a prompt.

    Prompt and reply are converted with ``renderer``. Every token has the log-probability log 0.5.

    Example:
        ScriptedEngine(renderer, lambda prompt: "<answer>Bruno</answer>")
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
        """Do nothing, because the engine holds no resources."""
