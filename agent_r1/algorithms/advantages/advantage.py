"""The interface of advantage estimators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from agent_r1.algorithms.component import Component, Need
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch


class Advantage(Component, ABC):
    """An advantage estimator. It computes one number per token: how much better an action was than expected.

    The batch that an estimator gets usually holds action tokens only. It also holds observation tokens if the setting
    ``masks.advantage`` or ``masks.loss`` of the algorithm is off.
    """

    name: str = ""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Everything that a run must provide for the estimator."""
    over_time: ClassVar[bool] = False
    """Whether the advantage changes if observation tokens between the actions are time steps too. An example is GAE
    over tokens."""
    uses_returns: ClassVar[bool] = True
    """Whether the advantage depends on the sum of rewards. If not, reward shaping has no effect."""

    uses_policy: ClassVar[bool] = False
    """Whether the advantage depends on log pi_old. If so, log pi_old is computed for stale samples, because the policy
    before the update is then not the sampler's policy."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The formula of the advantage in one line, such as "R - mean R of the group"."""

    @abstractmethod
    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the advantage of each of the N tokens of the batch: (N,), of any numeric data type.

        ``outputs`` are the outputs of the models for the batch, computed before the update.
        """


def require(output: Tensor | None, description: str) -> Tensor:
    """Return ``output``. Raise TypeError if ``output`` is None, which means that no model has computed the output.

    ``description`` names the output in the error, for example "a teacher's log-probabilities".
    """
    if output is None:
        raise TypeError(f"the algorithm needs {description}")
    return output
