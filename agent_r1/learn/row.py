"""What an algorithm is: a row of data, and the types its functions speak."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from agent_r1.learn.batch import Batch
from agent_r1.learn.samples import Filter

Need = Literal["critic", "group"]
"""A value model; more than one attempt at each task."""

Metrics = Mapping[str, Tensor]
"""Numbers by name, without gradient: each is the micro-batch's share, so that shares add up to the batch's."""


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """What models say of a batch's N action tokens before it is learned from.

    ``values`` (N,) float64: the critic's value of the state before each token, None without a critic.
    """

    values: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """What each action token is due.

    ``advantage`` (N,); ``weight`` (N,), its share of the loss: the denominators are those of the
    whole batch, so that cutting it into micro-batches changes nothing; ``value_target`` (N,), what
    the critic should have said, None without a critic. float64 on the CPU.
    """

    advantage: Tensor
    weight: Tensor
    value_target: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenView:
    """n action tokens of a micro-batch, as the models see them now.

    ``logprobs`` and ``values`` (n,) carry gradient; ``old`` and ``old_values`` are those of the
    weights the update began with. Values are None without a critic.
    """

    logprobs: Tensor
    old: Tensor
    values: Tensor | None
    old_values: Tensor | None


class Terms(BaseModel, ABC):
    """The numbers of an algorithm that a user may change; each family has its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(default=1, ge=1)

    @abstractmethod
    def row(self) -> Row:
        """The algorithm with these numbers."""


@dataclass(frozen=True, slots=True)
class Row:
    """An algorithm as data.

    ``objective`` says in one line what is optimised, with its numbers. ``loss`` is given a view of
    some tokens and the credit of the same tokens; losses of all micro-batches are summed.
    """

    name: str
    paper: str
    objective: str
    terms: Terms
    credit: Callable[[Batch, Signals], Credit]
    loss: Callable[[TokenView, Credit], tuple[Tensor, Metrics]]
    needs: frozenset[Need] = frozenset()
    filters: tuple[Filter, ...] = ()

    @property
    def epochs(self) -> int:
        """How often an update goes over its batch."""
        return self.terms.epochs
