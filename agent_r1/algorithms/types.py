"""Types for the data that models, algorithm and trainer exchange.

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
    """One number for each state of a batch.

    There is one state before each of the N tokens, and one state after the action of each of the S turns. An object of
    this class holds numbers of one kind: the critic's values, or the critic's targets, or the weights of the states in
    the critic's loss.
    """

    before_token: Tensor
    """(N,) one number per token, for the state before the token: a value, a target or a weight (see the class)."""
    after_action: Tensor
    """(S,) one number per turn, for the state after the turn's action: a value, a target or a weight (see the class).
    """


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """A model's most likely tokens for the N positions of a batch: k tokens for each position.

    Each token of the batch has one position. The tensors are on the CPU.
    """

    ids: Tensor
    """(N, k) int64 ids of the k most likely tokens for each position."""
    logprobs: Tensor
    """(N, k) float64 log-probabilities of the tokens in ``ids``."""

    def select(self, mask: Tensor) -> TopTokens:
        return TopTokens(self.ids[mask], self.logprobs[mask])


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """The outputs of the models for the N tokens of a batch, before the update: float64 tensors on the CPU.

    An output that was not computed is None.
    """

    old_logprobs: Tensor | None = None
    """(N,) log-probabilities under the policy before the update."""
    values: StateValues | None = None
    reference_logprobs: Tensor | None = None
    """(N,) log-probabilities under the reference policy."""
    teacher_logprobs: Tensor | None = None
    """(N,) log-probabilities under the teacher."""
    entropy: Tensor | None = None
    """(N,) entropies of the policy before the update, in nats."""
    teacher_top: TopTokens | None = None
    """The teacher's most likely tokens, for ``distillation``."""

    def select(self, mask: Tensor) -> ModelOutputs:
        """Return the outputs for the tokens that ``mask`` (N,) selects.

        ``values.after_action`` does not change, because it has one number per turn, and not per token.
        """
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
    """The value that the critic should predict for each state, and the weight of each state in the critic's loss.

    A state without a target has weight 0.
    """

    target: StateValues
    weight: StateValues


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The advantages of the N tokens of a batch, and their weights in the loss: float64 tensors on the CPU.

    ``loss_weight``, ``sft_weight`` and the weights of ``value_targets`` are already divided by the denominators of the
    averages over the whole batch. So the loss of a batch is the sum of the losses of its micro-batches.
    """

    advantage: Tensor
    loss_weight: Tensor
    """(N,) weight in the aggregated loss; 0 for a token that is not trained on."""
    importance_weight: Tensor
    """(N,) factor on the policy loss that corrects the mismatch between sampler and trainer; 1 without a correction. 0
    for a token that ``rejection`` or ``token_mask`` masks."""
    sft_weight: Tensor | None = None
    """(N,) weight of the term -log pi, with the current policy pi. Action tokens of successful trajectories have a
    weight for imitation (``sft_coef``), and observation tokens have a weight for prediction (``observation_nll_coef``).
    None if both coefficients are 0."""
    value_targets: ValueTargets | None = None
    """The critic's targets; None without a critic."""
    kl_coef: float = 0.0
    drift_weight: Tensor | None = None
    """(N,) weight of the term |log(pi / pi_old)| of KL-Cov, to be multiplied by ``loss_weight``. None without
    KL-Cov."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """The outputs of the models for the n tokens of a micro-batch, during the update.

    ``logprobs``, ``entropy``, ``values`` and ``top_logprobs`` have a gradient.
    """

    logprobs: Tensor
    """(n,) log-probabilities under the current policy pi."""
    entropy: Tensor
    """(n,) entropies of the current policy, in nats."""
    old_logprobs: Tensor
    """(n,) log of the denominator of the importance ratio."""
    ratio_unit: Tensor | None = None
    """(n,) int64 index of each token's unit. All tokens of a unit share one importance ratio. None if each token has
    its own ratio.

    With one ratio per turn, the action tokens of a turn are a unit, and its observation tokens are another unit. With
    one ratio per trajectory, the action tokens of a trajectory are a unit, and its observation tokens are another unit.
    """
    reference_logprobs: Tensor | None = None
    """(n,) log-probabilities under the reference policy. None if the algorithm needs no reference."""
    values: StateValues | None = None
    """The critic's values of all states of the micro-batch: the state before each token, and the state after the action
    of each turn. None without a critic."""
    old_values: StateValues | None = None
    """The critic's values of all states of the micro-batch, before the update. None without a critic."""
    sampler_logprobs: Tensor | None = None
    """(n,) log-probability of each token. For action tokens, the log-probability that the sampler recorded. For
    observation tokens, which were not sampled, the log-probability under the current policy, without gradient."""
    trajectory: Tensor | None = None
    """(n,) int64 indices. ``off_policy_mask`` averages the log-ratios over all tokens that have the same index. None
    without ``off_policy_mask``.

    The action tokens of a trajectory have one index, and the observation tokens of the trajectory have another index.
    """
    top_logprobs: Tensor | None = None
    """(n, k) the current policy's log-probabilities of the teacher's k most likely tokens. None without
    ``distillation``."""
    teacher_top_logprobs: Tensor | None = None
    """(n, k) the teacher's log-probabilities of the teacher's k most likely tokens. None without ``distillation``."""


Need = Literal["critic", "group", "greedy", "reference", "teacher", "role_baseline"]
"""Something that a run must provide for an algorithm.

critic: a value model. group: several attempts at each task. greedy: a greedy attempt at each task. reference: a copy of
the initial policy. teacher: a teacher policy. role_baseline: a running mean of the returns of each role, in games of
several agents.
"""

Level = Literal["token", "turn", "trajectory"]
"""The unit (token, turn or trajectory) whose tokens share one importance ratio or one correction."""

LARGEST = 10**9
"""Limit on the absolute value of a numeric parameter."""


class Component(BaseModel):
    """The settings of one part of an algorithm, such as the policy loss.

    For some parts, there are several classes to choose from. Each of these classes has a ``name``, such as "clip" for
    PPO's loss.
    """

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
        """Raise ValueError if a field that is not a bool gets true or false.

        Without this check, pydantic would convert true to 1.
        """
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

    An estimator gets a batch of action tokens only, unless the algorithm's ``masks.advantage`` or ``masks.loss`` is
    off.
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
    @abstractmethod
    def formula(self) -> str:
        """The formula of the advantage in one line, such as "R - mean R of the group"."""

    @abstractmethod
    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the advantage of each of the N tokens of the batch: (N,), of any numeric data type.

        ``outputs`` are the models' outputs before the update.
        """


def require(output: Tensor | None, description: str) -> Tensor:
    """Return ``output``, an output of a model.

    If the output is None, raise TypeError with ``description`` in the message.
    """
    if output is None:
        raise TypeError(f"the algorithm needs {description}")
    return output
