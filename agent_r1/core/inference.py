"""The interface of inference engines, which sample tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agent_r1.core.messages import Image

Transport = Literal["shared_memory", "safetensors", "lora"]
"""How an engine gets weights: as the module in the same process, from safetensors files, or from a LoRA adapter's
folder."""


Dtype = Literal["float32", "bfloat16"]

ProductPrecision = Literal["float32", "tf32", "bfloat16"]
"""The precision of matrix products: 24, 11 or 8 significant bits. TF32 is a mode of GPUs for tensors in float32."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the policy's weights, made by the optimizer step ``step``."""

    number: int  # 0: the initial weights of a run
    step: int
    checksum: str | None = None  # the sha256 of all tensors; None if not computed


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """A fixed prompt with log-probabilities from the trainer, to test which weights a server serves."""

    token_ids: tuple[int, ...]  # (n,)
    logprobs: tuple[float, ...]  # (n - 1,) of each token except the first, at temperature 1
    next_logprobs: Mapping[int, float]  # of the most likely next tokens, at inference/canary.py:TEMPERATURE


Canary = tuple[CanaryPrompt, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    adapter: Path  # a LoRA adapter in the format of peft
    base: Path  # the frozen weights of its base model, as safetensors files


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A reference to new weights. ``handle`` is a module, a folder, or (transport "lora") :class:`AdapterFolders`."""

    version: PolicyVersion
    transport: Transport
    handle: object
    canary: Canary = ()  # tests whether the engine has these weights; () if the engine reports a checksum


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """An image in a prompt, and the ranges of its placeholder tokens. The model reads one image feature at each."""

    image: Image
    spans: tuple[range, ...]

    @property
    def position(self) -> int:
        return self.spans[0].start

    @property
    def indices(self) -> list[int]:
        return [index for span in self.spans for index in span]

    def moved(self, offset: int) -> PromptMedia:
        spans = tuple(range(span.start + offset, span.stop + offset) for span in self.spans)
        return PromptMedia(self.image, spans)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that a completion continues, and their images."""

    token_ids: tuple[int, ...]
    media: tuple[PromptMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCondition:
    """The condition that ends a generation at one of the stop strings ``strings``.

    ``is_met`` takes all tokens sampled so far. The engine calls it after each sampled token, or when the engine itself
    has found one of ``strings``. If the string does not end the generation, for example because it is inside a thought,
    ``is_met`` returns False.
    """

    strings: tuple[str, ...]
    is_met: Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one generation. A completion includes the stop token, or the last token of a stop string.

    ``on_tokens`` is called after each sampled token with all tokens sampled so far, possibly in a thread of the engine.
    Engines that return only complete generations do not call it.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # the probability mass of nucleus sampling
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0  # determines the random numbers, independently of the rest of the batch
    stop_condition: StopCondition | None = None
    on_tokens: Callable[[Sequence[int]], None] | None = None


NO_POLICY = -1
"""The version of tokens that no weights sampled: a script, or the author of an example, wrote them."""


@dataclass(frozen=True, slots=True)
class PolicyVersionSpan:
    """Consecutive tokens of a completion, from index ``start`` to the next span, sampled with one policy version."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one generation, with their log-probabilities."""

    token_ids: tuple[int, ...]
    # log-softmax(logits / temperature) over the full vocabulary, with temperature 1 for greedy sampling
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[PolicyVersionSpan, ...]
    first_token_seconds: float | None = field(default=None, compare=False)  # from the request; None if not measured
    # Tokens from the KV cache do not count. If the cache of a running generation is removed, its tokens count again.
    prefilled_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens with their log-probabilities under the policy that sampled them; 0 for tokens that were not sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens(self.token_ids + other.token_ids, self.logprobs + other.logprobs)

    def continued(self, token_ids: tuple[int, ...]) -> ScoredTokens:
        """Return ``token_ids`` with the log-probabilities of the prefix that they share with this object, then 0."""
        pairs = enumerate(zip(self.token_ids, token_ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(self.token_ids), len(token_ids)))
        return ScoredTokens(token_ids, self.logprobs[:same] + (0.0,) * (len(token_ids) - same))


class ValueFunction(Protocol):
    """A critic, which predicts the rewards that follow a sequence of tokens."""

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        """Return V(context + branch) for each branch: the predicted sum of the rewards after the branch."""
        ...

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine. A run that needs a missing ability does not start."""

    transports: frozenset[Transport]
    max_context: int | None = None  # of a prompt and its completion together
    deterministic: bool = False  # equal prompts, seeds and weights give bit-identical completions in any batch
    max_sessions: int | None = None  # that keep a KV cache; requests of more sessions wait for a release
    stop_condition: bool = True  # whether SamplingParams.stop_condition is called after each token
    media: bool = False  # whether prompts can have images
    dtype: Dtype | None = None  # of the engine's weights; None: as published
    # An engine without checksums must test new weights with WeightUpdate.canary before it serves them.
    checksum: bool = True


class InferenceEngine(Protocol):
    """An engine that generates tokens. Prompts of one session can share the KV cache of their common beginning."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        """Return a completion of the prompt. Raise EngineError if the generation fails."""
        ...

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Load new weights, drop the KV caches of older weights, and return the version that the engine now serves."""
        ...

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None:
        """Stop the engine. Unfinished generations fail with EngineError."""
        ...
