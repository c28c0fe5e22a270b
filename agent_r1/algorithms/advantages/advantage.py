"""What every estimator of advantages is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from agent_r1.algorithms.component import Need, Component
from agent_r1.algorithms.signals import Estimate, ModelOutputs
from agent_r1.data.batch import TrainingBatch


class Advantage(Component, ABC):
    """Assigns credit. It is given action tokens only, unless the advantage mask was switched off.

    ``over_time`` says that what stands between two tokens matters to it; ``of_sums`` that it sees the sum of what
    was earned, so that shaping it changes something.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    over_time: ClassVar[bool] = False
    of_sums: ClassVar[bool] = True

    @property
    @abstractmethod
    def formula(self) -> str:
        """The advantage in one line, with its numbers."""

    @abstractmethod
    def estimate(self, batch: TrainingBatch, signals: ModelOutputs) -> Estimate:
        """The advantage of each token of the batch."""


def on_tokens(trajectories: Tensor, batch: TrainingBatch) -> Estimate:
    """An advantage per trajectory (M,), on all its tokens."""
    return Estimate(trajectories[batch.token_trajectory])


def asked(signal: Tensor | None, what: str) -> Tensor:
    """A signal that the row's needs promise."""
    if signal is None:
        raise TypeError(f"the algorithm needs {what}")
    return signal
