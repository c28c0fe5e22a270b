"""The interface of inference engines, which sample tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from agent_r1.core.messages import Image

Transport = Literal["shared_memory", "safetensors", "lora", "nccl"]
"""How an engine obtains weights. shared_memory: as a PyTorch module in the same process. safetensors: from a folder of
safetensors files. lora: from the folder of a LoRA adapter. nccl: by a broadcast between GPUs."""


Dtype = Literal["float32", "bfloat16"]

ProductPrecision = Literal["float32", "tf32", "bfloat16"]
"""The precision of matrix products: 24, 11 or 8 significant bits. TF32 is a mode of GPUs for tensors in float32."""


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the policy's weights.

    Attributes:
        number: the version number; the initial weights of a run have the number 0.
        step: the optimizer step that made these weights.
        checksum: the sha256 of all tensors; None if no checksum was computed.

    Example:
        PolicyVersion(number=3, step=3, checksum="9f86d0..")
    """

    number: int
    step: int
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class CanaryPrompt:
    """A fixed prompt with log-probabilities from the trainer, to test which weights a server serves.

    Attributes:
        token_ids: (n,) the tokens of the prompt.
        logprobs: (n - 1,) the log-probability of each token except the first, at temperature 1.
        next_logprobs: the log-probabilities of the most likely next tokens, by token id, at the temperature
            ``TEMPERATURE`` of ``inference/canary.py``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    next_logprobs: Mapping[int, float]


Canary = tuple[CanaryPrompt, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """A LoRA adapter in the format of peft, and the frozen weights of its base model, as folders of
    safetensors files.
    """

    adapter: Path
    base: Path


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A reference to new weights.

    Attributes:
        version: the version that an engine serves after the update.
        transport: how the engine obtains the weights (see :data:`Transport`).
        handle: depends on ``transport``. "shared_memory": the module. "safetensors": the folder. "lora": the
            :class:`AdapterFolders`. "nccl": the name of the process group.
        canary: prompts that test whether the engine has these weights; () if the engine reports a checksum.

    Example:
        WeightUpdate(version=PolicyVersion(3, step=3), transport="safetensors", handle=Path("/dev/shm/run/version-3"))
    """

    version: PolicyVersion
    transport: Transport
    handle: object
    canary: Canary = ()


FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """An image in a prompt, and the ranges of its placeholder tokens.

    The model reads one image feature at each placeholder token.

    Example:
        PromptMedia(image=image, spans=(range(4, 8), range(9, 13)))
    """

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
    """The tokens that a completion continues, and their images.

    Example:
        Prompt(token_ids=(1, 17, 4))
    """

    token_ids: tuple[int, ...]
    media: tuple[PromptMedia, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCondition:
    """The condition that ends a generation at one of the stop strings ``strings``.

    ``is_met`` takes all tokens sampled so far. An engine uses the condition in one of two ways:

    - The engine calls ``is_met`` after each sampled token.
    - The engine searches for ``strings`` itself, and calls ``is_met`` when it has found a string.

    If ``is_met`` returns True, the generation ends. ``is_met`` may return False for a stop string that does not end the
    generation, such as a string inside a thought.

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
        top_p: the probability mass of nucleus sampling. 1: no limit.
        top_k: sample only from the ``top_k`` most probable tokens. 0: no limit.
        stop_token_ids: tokens that end the generation. The completion includes the stop token.
        seed: determines the random numbers of the generation, independently of the rest of the batch.
        stop_condition: ends the generation at a stop string. The completion includes the last token of the string.
        top_logprobs: how many of the most likely tokens to return at each position. Only engines with the capability
            ``top_logprobs`` accept a value above 0.
        on_tokens: called after each sampled token with all tokens sampled so far, possibly in a thread of the engine.
            Engines that return only complete generations do not call this function.
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
    """Consecutive tokens of a completion, all sampled with the same version of the weights.

    ``start`` is the index of the first token. The span ends where the next span starts.
    """

    start: int
    version: int


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens at one position: pairs (token, log-probability), most likely first."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one generation, with their log-probabilities.

    Attributes:
        logprobs: log-softmax(logits / temperature) over the full vocabulary, with temperature 1 for greedy sampling.
        version_spans: which version of the weights sampled each token.
        top_logprobs: the most likely tokens at each position; () if not requested.
        first_token_seconds: the time from the request to the first token; None if not measured.
        prefilled_tokens: the number of tokens that were prefilled for the generation; None if not measured. Tokens that
            were in the KV cache, or were copied within the KV cache, are not counted. If keys and values of a running
            generation are removed, its tokens, including sampled tokens, are prefilled and counted again.

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
    """Tokens with their log-probabilities under the policy that sampled them; 0 for tokens that were not sampled.

    Example:
        ScoredTokens((1, 17, 4), (0.0, -0.1, -0.7))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens(self.token_ids + other.token_ids, self.logprobs + other.logprobs)

    def continued(self, token_ids: tuple[int, ...]) -> ScoredTokens:
        """Return ``token_ids`` as ScoredTokens.

        The prefix that ``token_ids`` shares with this object keeps its log-probabilities. All later tokens get 0.

        Example:
            >>> ScoredTokens((1, 17), (0.0, -0.1)).continued((1, 17, 4))
            ScoredTokens(token_ids=(1, 17, 4), logprobs=(0.0, -0.1, 0.0))
        """
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
    """The abilities of an engine. A run that needs a missing ability does not start.

    Attributes:
        transports: how the engine can obtain new weights.
        max_context: the maximum number of tokens in a prompt and its completion together. None: no limit.
        deterministic: whether equal prompts, seeds and weights give bit-identical completions in any batch.
        max_sessions: the maximum number of sessions that keep a KV cache at the same time. Requests of more sessions
            wait until a session is released. None: no limit.
        stop_condition: whether the engine calls ``SamplingParams.stop_condition`` after each token.
        media: whether the engine accepts images.
        dtype: the data type of the engine's weights. None: the data type of the published weights.
        checksum: whether the engine can compute a checksum of its weights. An engine without checksums must test new
            weights with ``WeightUpdate.canary`` before it serves these weights.
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
        """Return a completion of the prompt. Raise EngineError if the generation fails.

        Without ``session_id``, the engine need not keep the KV cache.
        """
        ...

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        """Load new weights, drop the KV caches of older weights, and return the version that the engine now serves.

        If ``update.version`` has a checksum, the returned version has the checksum of the engine's own weights. Raise
        EngineError if the weights cannot be loaded.
        """
        ...

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None:
        """Stop the engine. Unfinished generations fail with EngineError."""
        ...
