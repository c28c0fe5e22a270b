"""Everything an update learns from some samples, by models of a few weights, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.loss_terms import Correction, Kl, Rejection, RewardShaping
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.core.trajectory import Group
from agent_r1.data.assemble import Scope, assemble
from agent_r1.data.sequences import Packing, pack_prefix_tree
from agent_r1.data.training_sample import TrainingSample
from agent_r1.model.value_head import value_model
from agent_r1.trainer.forward_backward import Models, Prepared, learn

ENOUGH = 100_000
"""Tokens of a micro-batch that holds everything."""


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Of the action tokens: advantage, share, trust (n,); of everything: the loss, its gradient by every weight."""

    advantage: Tensor
    share: Tensor
    trust: Tensor
    loss: Tensor
    gradient: Tensor


def discounted(row: Algorithm) -> Algorithm:
    """The row, with gamma 0.9 and lambda 0.8 where it has these: at 1 too many mistakes cancel."""
    numbers = {"gamma": 0.9, "lam": 0.8} if isinstance(row.advantage, WithCritic) else {"gamma": 0.9}
    known = {name: number for name, number in numbers.items() if name in type(row.advantage).model_fields}
    return row.model_copy(update={"advantage": row.advantage.model_copy(update=known)})


def bootstrapped(row: Algorithm) -> Algorithm:
    """The row, whose credit goes on with the critic's value where an episode was cut."""
    return row.model_copy(update={"advantage": row.advantage.model_copy(update={"bootstrap": True})})


CORRECTED = Algorithm(
    name="corrected",
    advantage=ALGORITHMS["grpo"].advantage,
    kl=Kl(coefficient=0.1, estimator="k3_unbiased"),
    correction=Correction(level="token", high=1.5),
    rejection=Rejection(level="trajectory", low=0.5, high=2.0),
    shaping=RewardShaping(length=0.3, turns=0.2, process_scale="largest"),
    aggregation="group_mean",
    entropy=0.01,
)
BY_TURN = Algorithm(
    name="by-turn",
    advantage=ALGORITHMS["gtpo"].advantage,
    surrogate=Clip(dual=None),
    ratio="turn",
    aggregation="turn_mean",
    correction=Correction(level="turn", rule="window"),
    rejection=Rejection(level="turn", statistic="product", low=0.1, high=10.0),
)
ALL: tuple[Algorithm, ...] = (
    *map(discounted, ALGORITHMS.values()),
    *(bootstrapped(discounted(row)) for row in ALGORITHMS.values() if "critic" in row.needs),
    CORRECTED,
    BY_TURN,
)
"""Every row there is, and what rows could have but none has by itself."""


def tiny_model(seed: int, layers: int) -> PreTrainedModel:
    """A GPT-2 in fp64, its norms included. Without layers it looks at the last token only, wherever that stands."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=16,
        n_positions=128,
        n_embd=8,
        n_head=2,
        n_layer=layers,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).double().eval()
    if not layers:
        torch.nn.init.zeros_(model.transformer.wpe.weight)
        model.transformer.wpe.weight.requires_grad_(False)
    return model


@lru_cache
def tiny_models(layers: int) -> tuple[Models, PreTrainedModel]:
    """All the models that an algorithm may ask, and the policy as it was before the update."""
    policy = tiny_model(0, layers)
    critic = value_model(policy)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return Models(policy, 0.7, ENOUGH, critic, tiny_model(1, layers), tiny_model(2, layers)), _moved(policy)


@torch.no_grad()
def _moved(policy: PreTrainedModel) -> PreTrainedModel:
    older = tiny_model(0, policy.config.n_layer)
    random = torch.Generator().manual_seed(3)
    for parameter in older.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random).double())
    return older


@dataclass(frozen=True, slots=True)
class Learning:
    """How samples are learned from: by which row and models, laid out how, in micro-batches of how many tokens."""

    row: Algorithm
    layers: int = 0
    scope: Scope | None = None
    layout: Packing = pack_prefix_tree
    budget: int = ENOUGH

    def __call__(self, given: Sequence[TrainingSample]) -> Learned:
        prepared = self.prepared(given)
        return self.whole(prepared, lambda: learn(self.models, self.row, prepared, prepared.batch.sequences, 1.0).loss)

    @property
    def models(self) -> Models:
        models = replace(tiny_models(self.layers)[0], micro_tokens=self.budget)
        return models if "critic" in self.row.needs else replace(models, critic=None)

    def prepared(self, given: Sequence[TrainingSample]) -> Prepared:
        """The batch with its credit; the policy has moved since it was sampled, and since the update began."""
        batch = assemble(given, self.layout, self.scope or self.row.scope)
        before = Models(tiny_models(self.layers)[1], 0.7, self.budget).logprobs(batch)
        signals = replace(self.models.signals(batch), old=before, kl_coefficient=0.1)
        old = batch.sampler_logprobs if self.row.anchor == "sampler" else before
        return Prepared(batch, self.row.credit(batch, signals), signals, old)

    def whole(self, prepared: Prepared, loss: Callable[[], Tensor]) -> Learned:
        """What ``loss()`` adds to the gradients, with the credit that it came from."""
        weights = [
            *self.models.policy.parameters(),
            *([] if self.models.critic is None else self.models.critic.parameters()),
        ]
        for weight in weights:
            weight.grad = None
        number = loss()
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        chosen, credit = prepared.batch.chosen, prepared.credit
        return Learned(
            credit.advantage[chosen],
            credit.share[chosen],
            credit.trust[chosen],
            number,
            torch.cat([gradient.flatten() for gradient in gradients]),
        )


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Equal in fp64 but for the order of sums."""
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def sampled(model: PreTrainedModel, groups: list[Group], temperature: float) -> list[Group]:
    """The groups, with the log-probabilities that a sampler of these weights would have recorded."""

    def recorded(trajectory: Any, turn: Any) -> Any:
        prompt = trajectory.prompt_ids(turn)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + turn.action_ids])).logits[0, len(prompt) - 1 : -1]
        table = (logits / temperature).log_softmax(-1)
        return replace(turn, logprobs=tuple(table[range(len(turn.action_ids)), list(turn.action_ids)].tolist()))

    return [
        replace(
            group,
            trajectories=tuple(
                replace(trajectory, turns=tuple(recorded(trajectory, turn) for turn in trajectory.turns))
                for trajectory in group.trajectories
            ),
        )
        for group in groups
    ]
