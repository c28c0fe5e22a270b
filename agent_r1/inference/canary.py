"""The canary: fixed prompts whose log-probabilities prove which weights a server has.

The trainer computes the log-probabilities of these prompts with each version of the weights. A server must compute the
same log-probabilities, up to rounding, before it serves a request. A server's own report is no proof, because a part of
the server, such as a cache, can still have old weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.core.inference import Canary, CanaryPrompt, InferenceEngine, ProductPrecision, Prompt, SamplingParams
from agent_r1.core.threads import run_in_thread

NUM_PROMPTS, PROMPT_LENGTH = 2, 144
"""Fixed prompts that test a server, and their tokens, which fill at least one block of its prefix cache."""

TEMPERATURE = 0.7
"""The temperature for the token after a prompt. It is not 1, to detect servers that ignore the temperature."""

NUM_NEXT = 32
"""The number of most likely next tokens that the trainer stores for each prompt."""

NUM_COMPARED = 5
"""The number of likeliest tokens that a server returns. All must be among the trainer's ``NUM_NEXT``."""

NUM_SAMPLED = 32
"""The number of tokens that :func:`measure_gap` samples after each prompt."""


@dataclass(frozen=True, slots=True)
class Band:
    """Limits on the differences between log-probabilities of server and trainer that count as rounding, in nats."""

    mean: float  # the limit on the mean absolute difference
    maximum: float  # the limit on a single absolute difference
    # the smallest limit on |s - t|. The limit is higher if the trainer's changes t are large (see ``SAME_CHANGE``)
    floor: float


BANDS: Mapping[ProductPrecision, Band] = {
    "float32": Band(mean=2e-4, maximum=2e-3, floor=2e-5),
    "tf32": Band(mean=1e-2, maximum=0.3, floor=0.05),
    "bfloat16": Band(mean=0.1, maximum=1.0, floor=0.5),
}
"""The limits on the differences between log-probabilities of server and trainer, by the lower precision of the two."""

SAME_CHANGE = 0.25
"""An update changes a log-probability by t in the trainer, and by s in the server. The largest |s - t| of all fixed
prompts may be ``Band.floor`` + ``SAME_CHANGE`` * (the largest |t|)."""


@dataclass(frozen=True, slots=True)
class CanaryReading:
    """The log-probabilities that a server computed for one fixed test prompt."""

    logprobs: tuple[float, ...]  # the log-probability of each token of the prompt except the first, at temperature 1
    # the log-probabilities of the most likely next tokens at ``TEMPERATURE``, by token id
    next_logprobs: Mapping[int, float]


@torch.no_grad()
def compute_canary(model: PreTrainedModel) -> Canary:
    ids = _prompts(model)  # (B, T)
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits.cpu().float()  # (B, T, V)
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, T - 1)
    following = (logits[:, -1] / TEMPERATURE).log_softmax(-1)  # (B, V)
    following = following.topk(min(NUM_NEXT, following.shape[-1]))  # (B, NUM_NEXT)
    return tuple(
        CanaryPrompt(tuple(prompt), tuple(scores), dict(zip(tokens, values, strict=True)))
        for prompt, scores, tokens, values in zip(
            ids.tolist(), logprobs.tolist(), following.indices.tolist(), following.values.tolist(), strict=True
        )
    )


def _prompts(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.randint(vocabulary, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """The mean and the largest absolute difference between log-probabilities of engine and trainer, in nats."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return f"{self.mean:.2g} on average, {self.largest:.2g} at most"

    def is_rounding(self, precision: ProductPrecision) -> bool:
        """Return whether ``mean`` and ``largest`` are small enough to be rounding errors of ``precision``."""
        band = BANDS[precision]
        return self.mean <= band.mean and self.largest <= band.maximum


async def measure_gap(engine: InferenceEngine, model: PreTrainedModel) -> LogprobGap:
    """Return how much the log-probabilities of an engine and of ``model`` differ on tokens that the engine samples."""
    context = engine.capabilities.max_context or PROMPT_LENGTH + NUM_SAMPLED
    length = min(PROMPT_LENGTH, context // 2)
    params = SamplingParams(TEMPERATURE, max_tokens=min(NUM_SAMPLED, context - length))
    prompts = [tuple(prompt[:length]) for prompt in _prompts(model).tolist()]
    completions = await asyncio.gather(*(engine.generate(Prompt(prompt), params) for prompt in prompts))
    gaps: list[float] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = await run_in_thread(_score, model, prompt, completion.token_ids)
        gaps += [abs(own - other) for own, other in zip(expected, completion.logprobs, strict=True)]
    return LogprobGap(sum(gaps) / len(gaps), max(gaps))


@torch.no_grad()
def _score(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)  # (1, T)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()  # (N, V)
    scores = (logits / TEMPERATURE).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])  # (N, 1)
    return [float(score) for score in scores.squeeze(-1)]


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The log-probabilities of the fixed test prompts for one version of the weights."""

    canary: Canary  # computed by the trainer
    readings: tuple[CanaryReading, ...]  # computed by a server, one reading per prompt


def find_mismatch(now: CanaryResult, before: CanaryResult | None, precision: ProductPrecision) -> str | None:
    """Return a text that says how the log-probabilities of server and trainer disagree, or None if they agree.

    Server and trainer agree if rounding errors explain the differences in two comparisons:

    - The server's log-probabilities in ``now`` are compared with the trainer's log-probabilities in ``now``.
    - The server's changes from ``before`` to ``now`` are compared with the trainer's changes. Most rounding errors
      cancel out in a change. So a server with old weights is found even after a small optimizer step.
    """
    band = BANDS[precision]
    expected, found = _values(now.canary), _values(now.readings)
    if not found.keys() <= expected.keys():
        return "its most likely tokens are not among the trainer's"
    gaps = [abs(expected[place] - logprob) for place, logprob in found.items()]
    mean, largest = sum(gaps) / len(gaps), max(gaps)
    if not (mean <= band.mean and largest <= band.maximum):  # NaN is a mismatch, because the comparison is false
        limits = f"at most {band.mean:g} and {band.maximum:g} in {precision}"
        return f"its log-probabilities differ from the trainer's by {mean:.3g}, at most {largest:.3g} ({limits})"
    if before is None:
        return None
    old_expected, old_found = _values(before.canary), _values(before.readings)
    places = found.keys() & old_found.keys() & old_expected.keys()
    changes = [(expected[place] - old_expected[place], found[place] - old_found[place]) for place in places]
    wanted = max(abs(trainer) for trainer, _ in changes)
    missed = max(abs(trainer - server) for trainer, server in changes)
    if missed > band.floor + SAME_CHANGE * wanted:
        return f"its log-probabilities missed a change of {missed:.3g} in an update that changed them by {wanted:.3g}"
    return None


def _values(prompts: Sequence[CanaryPrompt | CanaryReading]) -> dict[tuple[int, bool, int], float]:
    values: dict[tuple[int, bool, int], float] = {}
    for number, prompt in enumerate(prompts):
        values |= {(number, False, index): logprob for index, logprob in enumerate(prompt.logprobs)}
        values |= {(number, True, token): logprob for token, logprob in prompt.next_logprobs.items()}
    return values
