"""The token weights, the loss and the gradient of an update on given samples, with tiny models in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from agent_r1.algorithms.advantages.critics import WithCritic
from agent_r1.algorithms.algorithm import Algorithm, RewardShaping
from agent_r1.algorithms.loss_terms import Correction, Kl, Rejection
from agent_r1.algorithms.policy_losses import Clip
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.trajectory import Group
from agent_r1.data.batch import TokenScope, TrainingBatch, TrainingSample, assemble_batch
from agent_r1.data.sequences import Packing, TokenSequence, pack_prefix_tree
from agent_r1.model.value_head import build_value_model
from agent_r1.trainer.forward_backward import ModelSet, forward_backward
from agent_r1.trainer.protocol import PassStats, PreparedBatch

UNLIMITED = 100_000
"""Tokens of a micro-batch that holds everything."""
KL_COEF = 0.1
TOP_K = 5
"""Number of the teacher's tokens, out of 16."""


@dataclass(frozen=True, slots=True, eq=False)
class UpdateResult:
    """Weights (n,) of the action tokens, the loss (), and its gradient with respect to all parameters."""

    advantage: Tensor
    loss_weight: Tensor
    importance_weight: Tensor
    loss: Tensor
    gradient: Tensor


def discounted(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with gamma 0.9 and lambda 0.8, if it has these: at 1 too many errors cancel."""
    numbers = {"gamma": 0.9, "lam": 0.8} if isinstance(algorithm.advantage, WithCritic) else {"gamma": 0.9}
    known = {name: number for name, number in numbers.items() if name in type(algorithm.advantage).model_fields}
    return algorithm.model_copy(update={"advantage": algorithm.advantage.model_copy(update=known)})


def bootstrapped(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with bootstrapping of truncated episodes."""
    return algorithm.model_copy(update={"advantage": algorithm.advantage.model_copy(update={"bootstrap": True})})


CORRECTED = Algorithm(
    name="corrected",
    advantage=ALGORITHMS["grpo"].advantage,
    kl=Kl(coefficient=0.1, estimator="k3_unbiased"),
    correction=Correction(level="token", high=1.5),
    rejection=Rejection(level="trajectory", low=0.5, high=2.0),
    shaping=RewardShaping(length=0.3, turns=0.2, process_scale="largest"),
    aggregation="group_mean",
    entropy_coef=0.01,
)
BY_TURN = Algorithm(
    name="by-turn",
    advantage=ALGORITHMS["gtpo"].advantage,
    loss=Clip(dual_clip=None),
    ratio_level="turn",
    aggregation="turn_mean",
    correction=Correction(level="turn", rule="window"),
    rejection=Rejection(level="turn", statistic="product", low=0.1, high=10.0),
)
ALL: tuple[Algorithm, ...] = (
    *map(discounted, ALGORITHMS.values()),
    *(bootstrapped(discounted(algorithm)) for algorithm in ALGORITHMS.values() if "critic" in algorithm.needs),
    CORRECTED,
    BY_TURN,
)
"""Every preset, and two algorithms with the terms that no preset uses."""

SOME = tuple(
    algorithm
    for name, algorithm in {one.name: one for one in ALL}.items()  # with bootstrapping if there is a critic
    if name
    in (
        *("grpo", "dr-grpo", "ppo", "steppo", "vapo", "bi-level-gae", "gspo", "gmpo", "vespo", "kl-cov", "opsm"),
        *("echo", "reinforce++", "gigpo", "hgpo", "remax", "top-k-distillation", "corrected", "by-turn"),
    )
)
"""Algorithms that together have each kind of estimator, loss, aggregation and term, for tests that run models."""


def tiny_model(seed: int, layers: int) -> PreTrainedModel:
    """Return a GPT-2 in float64, norms included. Without layers its output depends on the last token only, not on its
    position."""
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
def tiny_models(layers: int) -> tuple[ModelSet, PreTrainedModel]:
    """Return all the models that an algorithm may need, and the policy before the update."""
    policy = tiny_model(0, layers)
    critic = build_value_model(policy)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return ModelSet(policy, 0.7, UNLIMITED, critic, tiny_model(1, layers), tiny_model(2, layers)), _perturbed(policy)


@torch.no_grad()
def _perturbed(policy: PreTrainedModel) -> PreTrainedModel:
    older = tiny_model(0, policy.config.n_layer)
    random = torch.Generator().manual_seed(3)
    for parameter in older.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random).double())
    return older


def model_outputs(models: ModelSet, batch: TrainingBatch, old_logprobs: Tensor | None = None) -> ModelOutputs:
    """Return the outputs of all models but the policy for a batch."""
    return ModelOutputs(
        old_logprobs=old_logprobs,
        values=None if models.critic is None else models.values(batch),
        reference_logprobs=None if models.reference is None else models.logprobs(batch, "reference"),
        teacher_logprobs=None if models.teacher is None else models.logprobs(batch, "teacher"),
        entropy=models.entropy(batch),
        teacher_top=None if models.teacher is None else models.top_tokens(batch, TOP_K),
    )


def backward(
    models: ModelSet,
    algorithm: Algorithm,
    prepared: PreparedBatch,
    sequences: Sequence[TokenSequence],
    scale: float = 1.0,
) -> PassStats:
    """Run forward_backward on some sequences of a batch."""
    part = replace(prepared, batch=replace(prepared.batch, sequences=tuple(sequences)))
    return forward_backward(models, algorithm, part, scale)


@dataclass(frozen=True, slots=True)
class UpdateSetup:
    """How samples are trained on: the algorithm, the models, the packing, and the tokens per micro-batch."""

    algorithm: Algorithm
    layers: int = 0
    scope: TokenScope | None = None
    packing: Packing = pack_prefix_tree
    micro_tokens: int = UNLIMITED

    def __call__(self, samples: Sequence[TrainingSample]) -> UpdateResult:
        prepared = self.prepare(samples)
        sequences = prepared.batch.sequences
        return self.result(prepared, lambda: backward(self.models, self.algorithm, prepared, sequences).loss)

    @property
    def models(self) -> ModelSet:
        models = replace(tiny_models(self.layers)[0], micro_tokens=self.micro_tokens)
        return models if "critic" in self.algorithm.needs else replace(models, critic=None)

    def prepare(self, samples: Sequence[TrainingSample]) -> PreparedBatch:
        """Return the batch with its weights. The old policy differs from the sampler and from the present policy."""
        algorithm = self.algorithm
        batch = assemble_batch(samples, self.packing, self.scope or algorithm.token_scope)
        old = ModelSet(tiny_models(self.layers)[1], 0.7, self.micro_tokens).logprobs(batch)
        outputs = model_outputs(self.models, batch, old)
        weights = algorithm.compute_token_weights(batch, outputs, KL_COEF)
        denominator = batch.sampler_logprobs if algorithm.ratio_denominator == "sampler" else old
        return PreparedBatch(batch, weights, outputs, denominator)

    def result(self, prepared: PreparedBatch, loss_fn: Callable[[], Tensor]) -> UpdateResult:
        """Return the loss of ``loss_fn()`` and the gradient it accumulates, with the weights of the batch."""
        parameters = [
            *self.models.policy.parameters(),
            *([] if self.models.critic is None else self.models.critic.parameters()),
        ]
        for parameter in parameters:
            parameter.grad = None
        loss = loss_fn()
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        mask, weights = prepared.batch.action_mask, prepared.weights
        return UpdateResult(
            weights.advantage[mask],
            weights.loss_weight[mask],
            weights.importance_weight[mask],
            loss,
            torch.cat([gradient.flatten() for gradient in gradients]),
        )


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Return whether two float64 tensors are equal up to the order of sums."""
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def with_recorded_logprobs(model: PreTrainedModel, groups: list[Group], temperature: float) -> list[Group]:
    """Return the groups with the log-probabilities that a sampler with this model would have recorded."""

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
