"""Data that models, algorithm and trainer exchange, and the base class of the parts of an algorithm.

    TrainingBatch -> ModelOutputs -> Algorithm.compute_token_weights -> TokenWeights
    MicroBatch    -> TokenOutputs -> Algorithm.compute_loss          -> loss, Metrics

A batch has N tokens, S turns and M trajectories. A micro-batch has n tokens and s turns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import Tensor

from agent_r1.data.batch import TrainingBatch

Metrics = Mapping[str, Tensor]
"""Scalars without gradient, by the name of the metric. The value for a batch is the sum over its micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class StateValues:
    """One number for each state of a batch: the critic's value or target, or the weight of the state in its loss."""

    before_token: Tensor  # (N,) of the state before each token
    after_action: Tensor  # (S,) of the state after the action of each turn


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """A model's k most likely tokens at the position of each of the N tokens of a batch, on the CPU."""

    ids: Tensor  # (N, k) int64
    logprobs: Tensor  # (N, k) float64

    def select(self, mask: Tensor) -> TopTokens:
        return TopTokens(self.ids[mask], self.logprobs[mask])


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """The outputs of the models for the N tokens of a batch, before the update: float64 tensors on the CPU.

    An output that was not computed is None.
    """

    old_logprobs: Tensor | None = None  # (N,) under the policy before the update
    values: StateValues | None = None
    reference_logprobs: Tensor | None = None  # (N,) under the reference policy
    teacher_logprobs: Tensor | None = None  # (N,) under the teacher
    entropy: Tensor | None = None  # (N,) of the policy before the update, in nats
    teacher_top: TopTokens | None = None  # for ``distillation``

    def select(self, mask: Tensor) -> ModelOutputs:
        """Return the outputs for the tokens that ``mask`` (N,) selects. ``values.after_action`` has all turns."""
        old, reference, teacher, entropy = (
            None if column is None else column[mask]
            for column in (self.old_logprobs, self.reference_logprobs, self.teacher_logprobs, self.entropy)
        )
        values = self.values and replace(self.values, before_token=self.values.before_token[mask])
        return ModelOutputs(
            old, values, reference, teacher, entropy, self.teacher_top and self.teacher_top.select(mask)
        )


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """The value that the critic should predict for each state, and the weight of the state in its loss."""

    target: StateValues
    weight: StateValues


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The advantages of the N tokens of a batch, and their weights in the loss: float64 tensors on the CPU.

    ``loss_weight``, ``sft_weight`` and the weights of ``value_targets`` are already divided by the denominators of the
    averages over the whole batch. So the loss of a batch is the sum of the losses of its micro-batches.
    """

    advantage: Tensor  # (N,)
    loss_weight: Tensor  # (N,) weight in the aggregated loss; 0 for a token that is not trained on
    # (N,) factor on the policy loss that corrects the mismatch between sampler and trainer; 1 without a correction; 0
    # for a token that ``rejection`` or ``token_mask`` masks
    importance_weight: Tensor
    # (N,) weight of -log pi: ``sft_coef`` for action tokens of successful trajectories, ``observation_nll_coef`` for
    # observation tokens
    sft_weight: Tensor | None = None
    value_targets: ValueTargets | None = None  # None without a critic
    kl_coef: float = 0.0
    drift_weight: Tensor | None = None  # (N,) weight of |log(pi / pi_old)| of KL-Cov, a factor on ``loss_weight``


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """The outputs of the models for the n tokens of a micro-batch, during the update; None if not needed.

    ``logprobs``, ``entropy``, ``values`` and ``top_logprobs`` have a gradient.
    """

    logprobs: Tensor  # (n,) under the current policy pi
    entropy: Tensor  # (n,) of the current policy, in nats
    old_logprobs: Tensor  # (n,) log of the denominator of the importance ratio
    # (n,) index of the unit whose tokens share one importance ratio: the action tokens of a turn or trajectory, or its
    # observation tokens. None: each token has its own ratio.
    ratio_unit: Tensor | None = None
    reference_logprobs: Tensor | None = None  # (n,) under the reference policy
    values: StateValues | None = None  # the critic's values of the states of the micro-batch
    old_values: StateValues | None = None  # the same before the update
    sampler_logprobs: Tensor | None = None  # (n,) of the sampler; for observations, those of pi without gradient
    trajectory: Tensor | None = None  # (n,) index of the action tokens, or observations, of each trajectory
    turn: Tensor | None = None  # (n,) index of the action tokens, or observations, of each turn
    top_logprobs: Tensor | None = None  # (n, k) of the teacher's k most likely tokens, under pi
    teacher_top_logprobs: Tensor | None = None  # (n, k) of the same tokens, under the teacher


Need = Literal["critic", "group", "greedy", "reference", "teacher", "role_baseline"]
"""Something that a run must provide for an algorithm.

critic: a value model. group: several attempts at each task. greedy: a greedy attempt at each task. reference: a copy of
the initial policy. teacher: a teacher policy. role_baseline: a running mean of the returns of each role, in games of
several agents.
"""

Level = Literal["token", "turn", "trajectory"]
"""The unit (token, turn or trajectory) whose tokens share one importance ratio or one correction."""


LARGEST = 10**9  # absolute value of a parameter; larger integers overflow in tensors


class Component(BaseModel):
    """The settings of one part of an algorithm, such as the policy loss. Classes to choose from have a ``name``."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        ignored_types=(str,),  # a formula without settings can be a plain class attribute
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object, info: ValidationInfo) -> object:
        # pydantic would convert true to 1
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("it should be a number or a name, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _refuse_huge_numbers(cls, value: object) -> object:
        if isinstance(value, int | float) and abs(value) > LARGEST:
            raise ValueError(f"it should be at most {LARGEST:.0e}")
        return value


class Advantage(Component, ABC):
    """Base class of advantage estimators. An advantage is one number per token: how much better an action was than
    expected.

    An estimator gets only action tokens, unless the algorithm's ``masks.advantage`` or ``masks.loss`` is off.
    """

    name: str = ""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What a run must provide for the estimator."""
    over_time: ClassVar[bool] = False
    """Whether each token is a time step, as in GAE over tokens. If so, observation tokens in the batch also affect
    advantages."""
    uses_returns: ClassVar[bool] = True
    """Whether the advantage depends on ``token_rewards``, the weighted sum of the rewards of each token. If not, reward
    shaping (the setting ``shaping``) and a KL penalty on the rewards (``kl.placement`` "reward") have no effect."""

    uses_policy: ClassVar[bool] = False
    """Whether the advantage depends on log pi of the policy before the update. If so, a batch with tokens from older
    weights needs an extra forward pass."""

    @property
    def continuations_per_turn(self) -> int:
        """How many attempts continue each recorded attempt from each of its turns (``TrainingBatch.turn_values``)."""
        return 0

    def state_values(self, batch: TrainingBatch) -> StateValues | None:
        """Return the values of states that the estimator uses, for the record; None if it uses none or a critic's."""
        return None

    @property
    @abstractmethod
    def formula(self) -> str:
        """The formula of the advantage in one line, such as "R - mean R of the group"."""

    @abstractmethod
    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the advantage of each of the N tokens: (N,). ``outputs`` are the models' outputs before the update."""


def require(output: Tensor | None, description: str) -> Tensor:
    """Return ``output``, an output of a model. If it is None, raise TypeError with ``description``."""
    if output is None:
        raise TypeError(f"the algorithm needs {description}")
    return output
