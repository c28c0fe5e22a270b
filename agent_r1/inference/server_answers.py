"""Checks of the answers of servers, for the clients of vLLM and of SGLang."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_r1.core.inference import SamplingParams, TopLogprobs
from agent_r1.core.weights import Canary, Dtype
from agent_r1.inference.canary import CanaryReading, CanaryResult, find_mismatch
from agent_r1.inference.server_client import ReplicaError
from agent_r1.model.weights import product_precision


class Answer(BaseModel):
    """Base class for parts of a server's JSON answers. Undeclared fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


A = TypeVar("A", bound=Answer)


def read_answer(cls: type[A], response: httpx.Response, server: str) -> A:
    """Return the JSON of an answer as an instance of ``cls``. Raise ReplicaError if the JSON does not fit ``cls``.

    ``server`` is the name of the server's software, for the error message.
    """
    try:
        return cls.model_validate_json(response.content)
    except ValidationError as error:
        raise ReplicaError(f"its answer is not {server}'s: {error.errors()[0]['msg']}") from error


def check_sampled(
    tokens: Sequence[int], scored: Sequence[tuple[int, float]], finish_reason: str, params: SamplingParams
) -> tuple[float, ...]:
    """Return the log-probabilities of sampled tokens. Raise ReplicaError if the server's answer is not valid.

    ``scored`` holds (token id, log-probability) of each token that the server scored.
    """
    logprobs = tuple(logprob for _, logprob in scored)
    if [token for token, _ in scored] != list(tokens) or len(tokens) > params.max_tokens:
        raise ReplicaError("its tokens and log-probabilities do not belong together")
    if not all(math.isfinite(each) and each <= 1e-3 for each in logprobs):
        raise ReplicaError("a log-probability is positive or not finite")
    if finish_reason != "abort" and not tokens:
        raise ReplicaError(f"a request ended with {finish_reason!r} and without tokens")
    return logprobs


def most_likely(logprobs: Mapping[int, float], count: int) -> TopLogprobs:
    """Return the ``count`` most likely tokens of ``logprobs``, the most likely token first.

    Raise ReplicaError if ``logprobs`` has fewer than ``count`` tokens.
    """
    if len(logprobs) < count:
        raise ReplicaError(f"its answer has {len(logprobs)} of the {count} most likely tokens")
    return tuple(sorted(logprobs.items(), key=lambda pair: -pair[1])[:count])


class CanaryCheck:
    """Compares the log-probabilities of one server with the trainer's, for each version of the weights.

    ``dtype`` is the data type in which the server serves the weights.
    """

    def __init__(self, dtype: Dtype) -> None:
        self._dtype = dtype
        self._passed: CanaryResult | None = None  # the last result that matched

    async def verify(self, canary: Canary, read: Callable[[tuple[int, ...]], Awaitable[CanaryReading]]) -> None:
        """Raise ReplicaError if the server's log-probabilities differ from ``canary`` by more than rounding errors.

        ``canary`` holds fixed prompts with the trainer's log-probabilities. ``read`` returns the server's
        log-probabilities for the tokens of a prompt.
        """
        result = CanaryResult(canary, tuple([await read(prompt.token_ids) for prompt in canary]))
        if mismatch := find_mismatch(result, self._passed, product_precision(self._dtype)):
            raise ReplicaError(f"it does not serve the weights that it was sent: {mismatch}")
        self._passed = result
