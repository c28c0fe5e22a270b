"""Completions that take several requests, because a server aborted a request or stopped too early."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Completion,
    FinishReason,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    TopLogprobs,
)

MAX_ABORTS = 20
"""A generation fails after this number of aborted requests in a row without a new token."""

ABORT_SECONDS = 0.05
"""The pause after the first aborted request, in seconds. Each later pause is twice as long, up to
``MAX_ABORT_SECONDS``."""

MAX_ABORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Piece:
    """The answer of a server to one request.

    ``finish_reason`` is "abort" if the server ended the request before the answer was complete.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[PolicyVersionSpan, ...]
    finish_reason: Literal["stop", "length", "abort"]
    top_logprobs: tuple[TopLogprobs, ...] = ()


Request = Callable[[Prompt, SamplingParams], Awaitable[Piece]]


async def generate_in_pieces(request: Request, prompt: Prompt, params: SamplingParams) -> Completion:
    """Sample a completion of ``prompt`` by one or more requests, and return the completion.

    Each request continues the tokens sampled so far, with its own seed. Several requests are needed if the server
    aborts one, or stops at a stop string that does not meet the stop condition (for example, inside a thought).

    Raise EngineError if the server aborts ``MAX_ABORTS`` requests in a row without a new token.
    """
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[PolicyVersionSpan, ...] = ()
    top: tuple[TopLogprobs, ...] = ()
    aborts = 0
    while True:
        rest = replace(params, max_tokens=params.max_tokens - len(tokens), seed=seed_at(params.seed, len(tokens)))
        piece = await request(replace(prompt, token_ids=prompt.token_ids + tokens), rest)
        added = tuple(replace(span, start=span.start + len(tokens)) for span in piece.version_spans)
        spans += added[1:] if spans and added and spans[-1].version == added[0].version else added
        tokens, logprobs = tokens + piece.token_ids, logprobs + piece.logprobs
        top += piece.top_logprobs
        if piece.token_ids and (reason := finish_reason(tokens, params)):
            return Completion(tokens, logprobs, reason, spans, top)
        aborts = aborts + 1 if piece.finish_reason == "abort" and not piece.token_ids else 0
        if aborts >= MAX_ABORTS:
            raise EngineError(f"the server aborted the same request {aborts} times")
        if piece.finish_reason == "abort":
            await asyncio.sleep(min(ABORT_SECONDS * 2**aborts, MAX_ABORT_SECONDS))


def finish_reason(tokens: tuple[int, ...], params: SamplingParams) -> FinishReason | None:
    """Return why a generation is complete after ``tokens`` (at least one token). None: it must be continued."""
    if tokens[-1] in params.stop_token_ids:
        return "stop"
    condition = params.stop_condition
    if condition is not None and condition.is_met(tokens):
        return "stop"
    return "length" if len(tokens) >= params.max_tokens else None


def join(first: Completion, more: Completion) -> Completion:
    shifted = tuple(replace(span, start=span.start + len(first.token_ids)) for span in more.version_spans)
    parts = (first.prefilled_tokens, more.prefilled_tokens)
    is_same = first.version_spans and shifted and first.version_spans[-1].version == shifted[0].version
    return Completion(
        first.token_ids + more.token_ids,
        first.logprobs + more.logprobs,
        more.finish_reason,
        first.version_spans + (shifted[1:] if is_same else shifted),
        first.top_logprobs + more.top_logprobs,
        first.first_token_seconds,
        None if None in parts else sum(part or 0 for part in parts),
    )


def seed_at(seed: int, position: int) -> int:
    """Return the seed of a request that continues a completion after ``position`` sampled tokens.

    ``seed`` is the seed of the whole completion. The result is an integer below 2^63.
    """
    if position == 0:
        return seed % 2**63
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63
