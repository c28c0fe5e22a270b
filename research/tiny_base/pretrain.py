"""The pretraining of tiny-base: first copying, then following a question, then behaving like the bad planner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

from research.tiny_base.examples import Example, Maker, Mix


@dataclass(frozen=True, slots=True)
class Phase:
    """So many steps of one mix."""

    steps: int
    mix: Mix


PHASES = (
    Phase(steps=350, mix=Mix(repetitions=96)),
    Phase(steps=150, mix=Mix(repetitions=24, routes=72)),
    Phase(steps=700, mix=Mix(repetitions=12, routes=24, transcripts=72, readings=12)),
)
LEARNING_RATE = 4e-3
_WARM_UP, _COOL_DOWN, _LEAST = 50, 0.4, 0.02
"""Steps of warm-up; the share of the steps over which the rate falls to the least share of it."""

_PASS = 32
"""Examples of one forward pass; similar lengths go together, so that little is padding."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One optimizer step: its number, the mean loss of the learned tokens (nats), how many of them came first."""

    step: int
    loss: float
    accuracy: float


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int, phases: Sequence[Phase] = PHASES
) -> Iterator[Progress]:
    """Train in place, yielding after each step. The same seed, on one thread, gives the same bits."""
    maker = Maker(tokenizer, seed)
    batches = [partial(maker.batch, phase.mix) for phase in phases for _ in range(phase.steps)]
    return imitate(model, batches)


def imitate(
    model: Qwen2ForCausalLM, batches: Sequence[Callable[[], Sequence[Example]]], learning_rate: float = LEARNING_RATE
) -> Iterator[Progress]:
    """Train in place, a step on each of the batches, which are made when they are needed; yields after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, len(batches))
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy = _learn(model, batch())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield Progress(step, loss, accuracy)


def _schedule(step: int, steps: int) -> float:
    """The learning rate's share: up, flat, down in a line."""
    left = (steps - step) / (_COOL_DOWN * steps)
    return min(1.0, (step + 1) / _WARM_UP) * min(1.0, max(_LEAST, left))


def _learn(model: Qwen2ForCausalLM, examples: Sequence[Example]) -> tuple[float, float]:
    """Add the gradient of the mean loss over all learned tokens. Returns (loss, accuracy)."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    count = sum(sum(example.learned) for example in ordered)
    loss = hits = 0.0
    for first in range(0, len(ordered), _PASS):
        logits, targets = _predict(model, ordered[first : first + _PASS])
        part = functional.cross_entropy(logits, targets, reduction="sum") / count
        part.backward()
        loss += part.item()
        hits += int((logits.argmax(-1) == targets).sum())
    return loss, hits / count


def _predict(model: Qwen2ForCausalLM, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Logits (n, vocabulary) and targets (n,) of the learned tokens."""
    ids = _padded([torch.tensor(example.ids) for example in examples])
    learned = _padded([torch.tensor(example.learned) for example in examples])[:, 1:]
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return model.lm_head(states[learned]), ids[:, 1:][learned]


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows of one length, (rows, longest); what is added stands behind, where causal attention does not look."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
