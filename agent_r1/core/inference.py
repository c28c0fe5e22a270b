"""The interface between sessions, which request tokens, and inference engines, which sample tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agent_r1.core.messages import Image
from agent_r1.core.weights import Dtype, PolicyVersion, Transport, WeightUpdate

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """An image in a prompt, and the placeholder tokens that stand for it.

    The model reads the features of the image at these tokens, one feature at each token. The placeholders are in
    several ranges if the model puts other tokens between placeholders.

    Attributes:
        image: the image.
        spans: the ranges of the placeholder tokens in the prompt, in order.

    Example:
        PromptMedia(image, (range(4, 8), range(9, 13)))
    """

    image: Image
    spans: tuple[range, ...]

    @property
    def position(self) -> int:
        """The index of the first placeholder token."""
        return self.spans[0].start

    @property
    def indices(self) -> list[int]:
        """The indices in the prompt of all placeholder tokens of the image."""
        return [index for span in self.spans for index in span]

    def moved(self, offset: int) -> PromptMedia:
        """Return the same image with ``offset`` added to the indices of all its placeholder tokens."""
        spans = tuple(range(span.start + offset, span.stop + offset) for span in self.spans)
        return PromptMedia(self.image, spans)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The exact tokens that a completion continues, with their images if there are any.

    Example:
        Prompt(token_ids=(1, 17, 4))
    """

    token_ids: tuple[int, ...]
    media: tuple[PromptMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCondition:
    """The condition that ends a generation: a sampled token completes one of the stop strings ``strings``.

    After each sampled token, the engine calls ``is_met`` with all tokens sampled so far. The generation ends if the
    result is true. The result is false for a stop string inside a thought.

    An engine can also search for ``strings`` itself, as a server does. If the engine finds a stop string, it must still
    call ``is_met``, and continue the generation if the result is false.

    Example:
        StopCondition(("</search>",), is_met=lambda token_ids: decode(token_ids).endswith("</search>"))
    """

    strings: tuple[str, ...]
    is_met: Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one generation.

    Attributes:
        temperature: the sampling temperature. 0: the most probable token is chosen (greedy).
        top_p: only the most probable tokens are sampled: the smallest set of tokens with a total probability of at
            least ``top_p``. 1: no limit.
        top_k: only the ``top_k`` most probable tokens are sampled. 0: no limit.
        max_tokens: the largest number of new tokens.
        stop_token_ids: tokens that end the generation. The completion includes the stop token.
        seed: determines the random numbers of the generation, independently of other prompts in the batch.
        stop_condition: ends the generation at a stop string. The completion includes the token that completes the
            string.
        top_logprobs: for each sampled token, ``Completion.top_logprobs`` has this many of the most likely tokens. Only
            engines with the capability ``top_logprobs`` accept a number above 0.
        on_tokens: a function that is called after each sampled token, with all tokens sampled so far. The call can be
            in a thread of the engine. An engine that returns only complete generations makes no such calls.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_condition: StopCondition | None = None
    top_logprobs: int = 0
    on_tokens: Callable[[Sequence[int]], None] | None = None


@dataclass(frozen=True, slots=True)
class PolicyVersionSpan:
    """Consecutive tokens of a completion that were sampled with weights of the same version.

    ``start`` is the index of the first of these tokens. The span ends where the next span starts.
    """

    start: int
    version: int


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position, as pairs (token, log-probability), the most likely token first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one generation, with their log-probabilities.

    ``logprobs`` are log-softmax(logits / temperature) over the full vocabulary. For greedy sampling (temperature 0),
    the formula uses temperature 1. ``version_spans`` says which version of the weights sampled each token.

    ``top_logprobs`` is empty if ``SamplingParams.top_logprobs`` is 0. Otherwise it has one tuple for each sampled
    token. The tuple holds the most likely tokens at this position with their log-probabilities, the most likely token
    first.

    Two fields measure the work of the engine: ``first_token_seconds``, the time from the request to the first token,
    and ``prefilled_tokens``, the number of prompt tokens that were not in the KV cache. An engine that does not report
    these fields leaves them None. Comparisons (``==``) ignore these fields.

    Example:
        Completion(token_ids=(17, 4, 2), logprobs=(-0.1, -0.7, -0.01), finish_reason="stop",
                   version_spans=(PolicyVersionSpan(0, 3),))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[PolicyVersionSpan, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    first_token_seconds: float | None = field(default=None, compare=False)
    prefilled_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens with their log-probabilities under the policy that sampled them. A token that was not sampled has 0.

    Example:
        ScoredTokens((1, 17, 4), (0.0, -0.1, -0.7))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens(self.token_ids + other.token_ids, self.logprobs + other.logprobs)

    def continued(self, token_ids: tuple[int, ...]) -> ScoredTokens:
        """Return ``token_ids`` as ScoredTokens.

        The tokens before the first position at which ``token_ids`` differs from the tokens of this object keep the
        log-probabilities of this object. The other tokens get 0.

        Example:
            >>> ScoredTokens((1, 17), (0.0, -0.1)).continued((1, 17, 4))
            ScoredTokens(token_ids=(1, 17, 4), logprobs=(0.0, -0.1, 0.0))
        """
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.token_ids), len(token_ids)))
        return ScoredTokens(token_ids, self.logprobs[:same] + (0.0,) * (len(token_ids) - same))


class ValueFunction(Protocol):
    """An object that predicts the rewards that follow a sequence of tokens."""

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        """Return V(context + branch) for each branch: the predicted sum of the rewards after the branch.

        A branch is a continuation of ``context``, which has at least one token. An empty branch gives V(context). The
        implementation can keep the KV cache of the context under ``session_id`` for later calls.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Free the memory that is kept for the session."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine. If a run needs an ability that the engine lacks, the run does not start.

    Attributes:
        transports: the ways in which the engine can obtain new weights.
        max_context: the largest number of tokens in a prompt and its completion together; None if the engine sets no
            limit.
        deterministic: whether equal prompts, seeds and weights give bit-identical completions, independently of other
            prompts in the batch.
        max_sessions: the largest number of sessions that can keep a KV cache at the same time; None if the engine sets
            no limit. Requests of further sessions wait until a session is released.
        top_logprobs: whether the engine accepts ``SamplingParams.top_logprobs``.
        stop_condition: whether the engine calls ``SamplingParams.stop_condition`` after each token.
        media: whether the engine accepts prompts with images.
        dtype: the data type of the weights in the engine; None if the engine keeps the data type of the published
            weights.
        checksum: whether the engine can compute a checksum of its weights. An engine without checksums must compare its
            log-probabilities with the log-probabilities of the trainer before it serves new weights.
    """

    transports: frozenset[Transport]
    max_context: int | None = None
    deterministic: bool = False
    max_sessions: int | None = None
    top_logprobs: bool = False
    stop_condition: bool = True
    media: bool = False
    dtype: Dtype | None = None
    checksum: bool = True


class InferenceEngine(Protocol):
    """An engine that generates tokens.

    ``session_id`` names the conversation of a prompt. If two prompts of a session begin with the same tokens, the
    engine can reuse the KV cache of these tokens.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion of the prompt. Raise EngineError if the engine cannot complete the prompt.

        ``params`` says how to sample. Without ``session_id``, the KV cache of the prompt need not be kept.
        """
        ...

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Load new weights, drop the KV caches of older weights, and return the version that the engine now serves.

        If ``update.version`` has a checksum, the returned version has the checksum of the engine's own weights. An
        engine without the capability ``checksum`` gets updates without a checksum. Raise EngineError if the engine
        cannot load the weights.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Free the KV cache of the session."""
        ...

    async def close(self) -> None:
        """Stop the engine. Unfinished generations fail with EngineError."""
        ...
