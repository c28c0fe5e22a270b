"""What passes between models and algorithms: what models say of a batch, what its tokens are due, what a loss sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

Metrics = Mapping[str, Tensor]
"""Numbers by name, without gradient: each is the micro-batch's share, so that shares add up to the batch's."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutputs:
    """What models say of a batch's N tokens and S turns before it is learned from; None where nobody was asked.

    ``old`` (N,): log-probabilities under the weights the update begins with. ``values`` (N,): the critic's value of
    the state before each token; ``ends`` (S,): that of the state each turn's action leads to. ``reference`` and
    ``teacher`` (N,): log-probabilities under those policies. All float64. ``kl_coefficient`` is the present one.
    """

    old: Tensor | None = None
    values: Tensor | None = None
    ends: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    kl_coefficient: float = 0.0

    def at(self, chosen: Tensor) -> ModelOutputs:
        """The same for the chosen (N,) tokens only; turns stay."""
        old, values, reference, teacher = (
            None if column is None else column[chosen]
            for column in (self.old, self.values, self.reference, self.teacher)
        )
        return replace(self, old=old, values=values, reference=reference, teacher=teacher)


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """What the critic should have said of N states before tokens and S states after actions, and each's share of its
    loss: 0 where nothing is known."""

    tokens: Tensor
    token_shares: Tensor
    ends: Tensor
    end_shares: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """Advantages (N,) of a batch's tokens, and targets for the critic where there is one."""

    advantage: Tensor
    targets: ValueTargets | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """What each token is due. float64 on the CPU.

    ``advantage`` (N,). ``share`` (N,): each token's share of the loss; the denominators are those of the whole
    batch, so that cutting it into micro-batches changes nothing. ``trust`` (N,): what is left of its policy loss
    where sampler and trainer disagree, 1 where they agree. ``imitation`` (N,): what -log pi of the token weighs,
    None where nothing is imitated. ``targets`` are the critic's.
    """

    advantage: Tensor
    share: Tensor
    trust: Tensor
    imitation: Tensor | None = None
    targets: ValueTargets | None = None
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CriticView:
    """What the critic says of a micro-batch now, with gradient, and what it said before the update: of the states
    before its n tokens, and after the actions of its s turns."""

    values: Tensor
    ends: Tensor
    old_values: Tensor
    old_ends: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """n tokens of a micro-batch, as the models see them now.

    ``logprobs`` and ``entropy`` (n,) carry gradient; ``old`` (n,) is what a ratio compares with, ``reference`` (n,)
    another policy's, None without. ``turn`` and ``trajectory`` (n,) number the units among these tokens from 0, what
    was chosen and what was observed apart: observations would dilute the mean ratio of the actions beside them.
    """

    logprobs: Tensor
    entropy: Tensor
    old: Tensor
    turn: Tensor
    trajectory: Tensor
    reference: Tensor | None = None
    critic: CriticView | None = None
