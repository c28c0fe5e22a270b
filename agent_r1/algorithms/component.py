"""The base class of the parts of an algorithm, which are immutable, validated data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import Tensor

from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch

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
