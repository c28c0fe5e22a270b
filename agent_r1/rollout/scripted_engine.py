"""The fake engine we ship: it says what a script says, through the real tokenizer and template."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from agent_r1.core.acting import Completion, Prompt, Sampling, Span, Stop, Weights
from agent_r1.rollout.chat import Chat

LOGPROB = math.log(0.5)


def completion_of(chat: Chat, text: str, max_tokens: int, version: int) -> Completion:
    """A text as if a model had sampled it, with the token that ends a turn; cut after ``max_tokens``."""
    ids = (*chat.encode(text), chat.end_id)
    kept = ids[:max_tokens]
    stop: Stop = "stop" if len(kept) == len(ids) else "length"
    return Completion(kept, (LOGPROB,) * len(kept), stop, (Span(0, version),))


class ScriptedEngine:
    """Implements core ``Engine``: ``reply(prompt text) -> text`` decides each completion.

    Every token gets the log-probability log 0.5. A reply longer than ``max_tokens`` is cut, as a model's would be.

    Example:
        ScriptedEngine(chat, lambda prompt: "<answer>Bruno</answer>")
    """

    def __init__(self, chat: Chat, reply: Callable[[str], str]) -> None:
        self._chat, self._reply = chat, reply
        self._version = 0
        self.released: list[str] = []

    async def generate(self, prompt: Prompt, sampling: Sampling, session: str | None = None) -> Completion:
        await asyncio.sleep(0)
        text = str(self._chat.tokenizer.decode(list(prompt.ids), skip_special_tokens=False))
        return completion_of(self._chat, self._reply(text), sampling.max_tokens, self._version)

    async def load(self, weights: Weights) -> None:
        self._version = weights.version

    async def digest(self) -> str:
        return f"script {self._version}"

    async def release(self, session: str) -> None:
        self.released.append(session)
