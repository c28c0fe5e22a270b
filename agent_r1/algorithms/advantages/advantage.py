"""The interface of advantage estimators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from agent_r1.algorithms.component import Component, Need
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.data.batch import TrainingBatch


class Advantage(Component, ABC):
    """An advantage estimator. It sees action tokens only, unless the advantage mask is switched off."""

    name: str = ""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """Requirements on the run."""
    over_time: ClassVar[bool] = False
    """Whether tokens between two action tokens would change the advantage, as in GAE over tokens."""
    uses_returns: ClassVar[bool] = True
    """Whether it depends on the summed rewards, so that shaping them has an effect."""

    uses_policy: ClassVar[bool] = False
    """Whether it depends on the policy's own log-probabilities, which differ from the sampler's on stale samples."""

    @property
    @abstractmethod
    def formula(self) -> str:
        """The advantage in one line, with the values of its settings."""

    @abstractmethod
    def compute(self, batch: TrainingBatch, outputs: ModelOutputs) -> Tensor:
        """Return the advantage of each token of the batch: (N,) float64."""


def require(output: Tensor | None, description: str) -> Tensor:
    """Return a model output; TypeError if it was not computed."""
    if output is None:
        raise TypeError(f"the algorithm needs {description}")
    return output
