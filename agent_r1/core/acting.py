"""How tokens are asked for: the contract between the agent loop and an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Stop = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The exact tokens an engine conditions on."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a generation ends although no token of its own ends it: with the token that completes one of ``texts``.

    ``reached(ids)`` says whether the tokens sampled so far end there: asked after each, it depends on them only.
    A text may also stand where nothing ends (in a thought), so an engine that only looks for ``texts`` has to ask too.

    Example:
        Ending(("</search>", "</answer>"), reached=lambda ids: decode(ids).endswith(("</search>", "</answer>")))
    """

    texts: tuple[str, ...]
    reached: Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. ``temperature`` 0 is greedy; ``seed`` fixes the draw independently of the batch.

    ``max_tokens`` counts new tokens. ``stop_ids`` end a generation and are part of it; so is the token
    with which ``ending`` is reached, whatever it says beyond that.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """From token ``start`` of a completion on, weights of ``version`` were in use."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens. ``logprobs`` are log-softmax(logits / temperature) over the full vocabulary.

    Greedy completions carry log-probabilities at temperature 1.

    Example:
        Completion(ids=(17, 4, 2), logprobs=(-0.1, -0.7, -0.01), stop="stop", spans=(Span(0, 3),))
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: Stop
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights by reference: where they are, which version, and a digest to check them by."""

    version: int
    kind: Literal["module", "folder", "adapter", "nccl"]
    ref: object
    digest: str


class Engine(Protocol):
    """Samples tokens. ``session`` is a hint: the engine may reuse the equal prefix it still holds."""

    async def generate(self, prompt: Prompt, sampling: Sampling, session: str | None = None) -> Completion:
        """Sample a completion. Raises EngineError where it cannot."""
        ...

    async def load(self, weights: Weights) -> None:
        """Use these weights from now on; caches of older weights are dropped."""
        ...

    async def digest(self) -> str:
        """The digest of the weights that it samples from, as they are where it computes: that of ``Weights.digest``."""
        ...

    async def release(self, session: str) -> None:
        """Forget what is held for the session."""
        ...
