"""The contract between sessions, which need tokens, and inference engines, which sample them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1.core.messages import Media
from agent_r1.core.weights import Dtype, PolicyVersion, Transport, WeightUpdate

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """A piece of media in a prompt: its reference and the index of its first placeholder token."""

    media: Media
    position: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """The exact tokens that an engine conditions on.

    Example:
        Prompt(token_ids=(1, 17, 4))
    """

    token_ids: tuple[int, ...]
    media: tuple[PromptMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Ends a generation with the token that completes one of ``strings``.

    ``is_met(token_ids)`` is called after each sampled token with all tokens sampled so far, and depends on them only.
    A stop string inside a thought does not end the generation, so an engine that searches for ``strings`` itself
    (a server) has to call ``is_met`` as well.

    Example:
        StopCondition(("</search>",), is_met=lambda token_ids: decode(token_ids).endswith("</search>"))
    """

    strings: tuple[str, ...]
    is_met: Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one generation.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: the most new tokens.
        stop_token_ids: tokens that end the generation; the completion includes the one that does.
        seed: determines the random numbers, whatever else is in the batch.
        stop_condition: ends the generation with a text; the completion includes the token that completes the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_condition: StopCondition | None = None


@dataclass(frozen=True, slots=True)
class PolicyVersionSpan:
    """The tokens of a completion from index ``start`` on were sampled with weights of version number ``version``."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens with their log-probabilities.

    ``logprobs`` are log-softmax(logits / temperature) over the full vocabulary; greedy completions carry
    log-probabilities at temperature 1.

    Example:
        Completion(token_ids=(17, 4, 2), logprobs=(-0.1, -0.7, -0.01), finish_reason="stop",
                   version_spans=(PolicyVersionSpan(0, 3),))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[PolicyVersionSpan, ...]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine, so that a run that needs more fails before it starts.

    Attributes:
        transports: how it can obtain new weights.
        max_context: the most tokens of a prompt and its completion; None if the engine sets no bound.
        deterministic: equal prompts, seeds and weights give equal bits, whatever else is in the batch.
        stop_condition: it calls ``SamplingParams.stop_condition`` after each token.
        media: it accepts prompts with images.
        dtype: the data type in which it serves weights; None if it serves them as they are published.
    """

    transports: frozenset[Transport]
    max_context: int | None = None
    deterministic: bool = False
    stop_condition: bool = True
    media: bool = False
    dtype: Dtype | None = None


class InferenceEngine(Protocol):
    """Samples tokens. ``session_id`` is a hint: the engine may reuse the KV cache of an equal prefix that it holds."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion. Raises EngineError if the engine cannot."""
        ...

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Serve new weights from now on and drop caches of older ones; return the version now served.

        If the version of the update has a checksum, the returned checksum is computed from the engine's own weights.
        Raises EngineError if the engine cannot load the weights.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Free the KV cache of the session."""
        ...

    async def close(self) -> None:
        """Stop the engine; running generations fail with EngineError."""
        ...
