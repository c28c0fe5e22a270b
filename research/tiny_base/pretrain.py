"""Pretrain tiny-base: first on copying, then on looking up a fact, then on the bad planner's transcripts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, SeedOssConfig, SeedOssForCausalLM

from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.tasksets.tinywiki.wiki import CLASSES, ENTITIES, RELATIONS, draw
from research.tiny_base import examples as planner
from research.tiny_base.examples import TOOLS, Example, ExampleMaker, Mix
from research.tiny_base.tokenizer import make_tokenizer


@dataclass(frozen=True, slots=True)
class Phase:
    """A number of steps on one mix of examples."""

    steps: int
    mix: Mix


PHASES = (
    Phase(steps=230, mix=Mix(repetitions=96)),
    Phase(steps=150, mix=Mix(repetitions=24, lookups=72)),
    Phase(steps=450, mix=Mix(repetitions=8, lookups=16, transcripts=48, readings=8)),
)
LEARNING_RATE = 4e-3
_WARMUP_STEPS, _DECAY_SHARE, _FINAL_RATE = 50, 0.4, 0.02
"""Steps of warm-up; the share of the steps in which the rate decays; the final rate as a share of the peak."""

_MICRO_BATCH = 32
"""Examples per forward pass. They are sorted by length to reduce padding."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One optimizer step: its number, the mean loss per target token (nats), the share of targets predicted first."""

    step: int
    loss: float
    accuracy: float


def pretrain(
    model: SeedOssForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int, phases: Sequence[Phase] = PHASES
) -> Iterator[Progress]:
    """Train in place and yield after each step. On one thread, equal seeds give equal bits."""
    maker = ExampleMaker(tokenizer, seed)
    batches = [partial(maker.batch, phase.mix) for phase in phases for _ in range(phase.steps)]
    return train_on_batches(model, batches)


def train_on_batches(
    model: SeedOssForCausalLM, batches: Sequence[Callable[[], Sequence[Example]]], learning_rate: float = LEARNING_RATE
) -> Iterator[Progress]:
    """Train in place, one step per batch, and yield after each step. A batch is made when it is needed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _schedule(step, len(batches))
        optimizer.zero_grad(set_to_none=True)
        loss, accuracy = _backward(model, batch())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield Progress(step, loss, accuracy)


def _schedule(step: int, steps: int) -> float:
    """Return the learning rate as a share of the peak: linear warm-up, constant, linear decay."""
    left = (steps - step) / (_DECAY_SHARE * steps)
    return min(1.0, (step + 1) / _WARMUP_STEPS) * min(1.0, max(_FINAL_RATE, left))


def _backward(model: SeedOssForCausalLM, examples: Sequence[Example]) -> tuple[float, float]:
    """Add the gradient of the mean loss over all target tokens; return (loss, accuracy)."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    count = sum(sum(example.targets) for example in ordered)
    loss = hits = 0.0
    for first in range(0, len(ordered), _MICRO_BATCH):
        logits, targets = _target_logits(model, ordered[first : first + _MICRO_BATCH])
        part = functional.cross_entropy(logits, targets, reduction="sum") / count
        part.backward()
        loss += part.item()
        hits += int((logits.argmax(-1) == targets).sum())
    return loss, hits / count


def _target_logits(model: SeedOssForCausalLM, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return the logits (n, vocabulary) and the ids (n,) of the target tokens."""
    ids = _pad([torch.tensor(example.ids) for example in examples])
    is_target = _pad([torch.tensor(example.targets) for example in examples])[:, 1:]
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return model.lm_head(states[is_target]), ids[:, 1:][is_target]


def _pad(rows: list[Tensor]) -> Tensor:
    """Pad on the right to (rows, longest); causal attention does not see the padding."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


_SAMPLES = 100
"""Enough conversations to contain every piece of text that occurs in any conversation."""


def make_initial_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer with the vocabulary of TinyWiki's conversations."""
    rng = random.Random(0)
    renderer = TemplateRenderer(make_tokenizer([]))
    texts = [*ENTITIES, *RELATIONS]
    for _ in range(_SAMPLES):
        wiki = draw(CLASSES["train"], rng)
        texts.append(renderer.render_text(planner.transcript(wiki, rng), TOOLS))
        texts.append(renderer.render_text(planner.reading(wiki, rng), ()))
    return make_tokenizer(texts)


def make_initial_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> SeedOssForCausalLM:
    """Return a model of 0.2 million parameters with Qwen2's layers; its random weights depend on the seed only.

    It has the model type of Seed-OSS, whose layers are the same: for every model of type qwen2, transformers replaces
    the saved tokenizer by Qwen2's own.
    """
    config = SeedOssConfig(
        vocab_size=8 * math.ceil(len(tokenizer) / 8),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attention_dropout=0.0,
        residual_dropout=0.0,
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SeedOssForCausalLM(config)
    _attend_to_previous(model)
    return model


def _attend_to_previous(model: SeedOssForCausalLM, strength: float = 6.0, planes: int = 3) -> None:
    """Make the first head of the first layer attend to the previous token, whatever the tokens are.

    Copying needs such a head and a second one that uses it (induction: Olsson et al. 2022, arXiv 2209.11895);
    a small model needs thousands of steps to find the first and a few hundred to find the second. Query and key biases
    are sufficient: rotary positions rotate plane i by the i-th frequency per token, so a query bias that is the key
    bias rotated by one token has its best match one token back.
    """
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    frequencies = model.model.rotary_emb.inv_freq[:planes]
    with torch.no_grad():
        attention.k_proj.bias[:planes] = strength
        attention.q_proj.bias[:planes] = strength * frequencies.cos()
        attention.q_proj.bias[half : half + planes] = -strength * frequencies.sin()
