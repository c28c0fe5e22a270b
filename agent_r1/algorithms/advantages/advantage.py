"""The interface of advantage estimators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from agent_r1.algorithms.component import Component, Need
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch


class Advantage(Component, ABC):
    """An advantage estimator.

    The batch that an estimator gets holds action tokens only, unless the advantage mask or the loss mask is switched
    off.
    """

    name: str = ""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """The requirements of the estimator on a run."""
    over_time: ClassVar[bool] = False
    """Whether the advantage changes if observation tokens between the actions are time steps too, as in GAE over
    tokens.
    """
    uses_returns: ClassVar[bool] = True
    """Whether the advantage depends on the sum of rewards. Reward shaping has no effect on other
    estimators."""

    uses_policy: ClassVar[bool] = False
    """Whether the advantage depends on log pi_old. On stale samples, log pi_old must be computed: the policy before
    the update is not the sampler's policy."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The formula of the advantage in one line, with the values of the settings."""

    @abstractmethod
    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the advantage of each token of the batch: (N,) float64."""


def require(output: Tensor | None, description: str) -> Tensor:
    """Return ``output``, or raise TypeError if this output of a model was not computed (None)."""
    if output is None:
        raise TypeError(f"the algorithm needs {description}")
    return output
