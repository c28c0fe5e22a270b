"""The interface of advantage estimators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from agent_r1.algorithms.component import Component, Need
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch


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
