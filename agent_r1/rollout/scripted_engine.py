"""The fake engine we ship: it says what a script says, through the real tokenizer and template."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from agent_r1.core.acting import Completion, Ending, Prompt, Sampling, Span, Stop, Weights
from agent_r1.rollout.chat import Chat

LOGPROB = math.log(0.5)


def completion_of(chat: Chat, text: str, sampling: Sampling, version: int) -> Completion:
    """A text as if a model had sampled it, with the token that ends a turn; it stops where a model's would."""
    ids = (*chat.encode(text), chat.end_id)
    if sampling.ending is not None:
        ids = _up_to(sampling.ending, ids)
    kept = ids[: sampling.max_tokens]
    stop: Stop = "stop" if len(kept) == len(ids) else "length"
    return Completion(kept, (LOGPROB,) * len(kept), stop, (Span(0, version),))


def _up_to(ending: Ending, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens up to the one with which the ending is reached; all where none does."""
    count = next((count for count in range(1, len(ids)) if ending.reached(ids[:count])), len(ids))
    return ids[:count]


class ScriptedEngine:
    """Implements core ``Engine``: ``reply(prompt text) -> text`` decides each completion.

    Every token gets the log-probability log 0.5. A reply stops where a model's would: after ``max_tokens``, or where
    the format ends it.

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
        return completion_of(self._chat, self._reply(text), sampling, self._version)

    async def load(self, weights: Weights) -> None:
        self._version = weights.version

    async def digest(self) -> str:
        return f"script {self._version}"

    async def release(self, session: str) -> None:
        self.released.append(session)
