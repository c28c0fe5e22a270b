"""How noisy the policy gradient is by how credit is assigned, where the right answer is known.

    python benchmarks/credit.py                       the table
    python benchmarks/credit.py --first 0.2 --last 0.5   another policy

A bandit of two turns: in each the policy chooses one of two arms, and only the first turn's choice earns anything, 1
or 0. The policy is a table of one logit per turn, so that the true gradient of its last logit is 0. Nothing is sampled:
every way in which a group of attempts can end is weighed by its probability, so mean and variance are exact.

Estimators differ in scale. So the noise is told as the variance of the gradient (of both logits together) over the
squared length of its mean: that many groups have to be averaged until noise is as large as signal.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product
from math import factorial, prod

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.presets import ALGORITHMS
from agent_r1.algorithms.types import ModelOutputs
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Status, Trajectory, Turn
from agent_r1.data.assemble import assemble
from agent_r1.data.batch import TrainingBatch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable

ATTEMPTS = 4
"""Of a group."""

OF_TRAJECTORIES = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
"""Rows that give all turns of an attempt the same credit."""

OF_TURNS = ("gigpo", "gtpo", "process-grpo", "reinforce", "ppo-turn")
"""Rows that tell the turns of an attempt apart."""

Arms = tuple[int, int]
"""What an attempt chose: 0 or 1 in each of its two turns."""

EITHER: tuple[Arms, ...] = tuple(product((0, 1), (0, 1)))


@dataclass(frozen=True, slots=True)
class Noise:
    """Of the gradient by the logits of the two turns: its mean (2,), and the variance (2,) between groups."""

    mean: Tensor
    variance: Tensor

    @property
    def over_signal(self) -> float:
        """The variance of both over the squared length of the mean."""
        return float(self.variance.sum() / self.mean.square().sum())


def noise(row: Algorithm, first: float, last: float, *, late: bool = False) -> Noise:
    """Under a policy that chooses arm 1 with these probabilities. ``late``: what the first turn earned is paid at the
    end, as an outcome of the whole."""
    chances = torch.tensor([first, last], dtype=torch.float64)
    probability, gradients = [], []
    for arms in combinations_with_replacement(EITHER, ATTEMPTS):
        chosen = torch.tensor(arms, dtype=torch.float64)
        probability.append(_orders(arms) * torch.where(chosen > 0, chances, 1 - chances).prod())
        gradients.append(_gradient(row, _batch(arms, late), chosen, chances))
    weight, gradient = torch.stack(probability)[:, None], torch.stack(gradients)
    mean = (weight * gradient).sum(0)
    return Noise(mean, (weight * (gradient - mean).square()).sum(0))


def _orders(arms: Sequence[Arms]) -> int:
    """In how many orders the attempts of a group could have come; no estimator tells them apart."""
    return factorial(len(arms)) // prod(factorial(count) for count in Counter(arms).values())


def _gradient(row: Algorithm, batch: TrainingBatch, chosen: Tensor, chances: Tensor) -> Tensor:
    """(2,) of what a row maximises, by the logits: that of log pi(arm) is arm - pi(1). A critic would know all."""
    worth = torch.tensor([chances[0], 0.0], dtype=torch.float64).repeat(ATTEMPTS)
    signals = ModelOutputs(values=worth, ends=torch.zeros_like(worth), reference=batch.sampler_logprobs)
    credit = row.compute_token_weights(batch, signals)
    return ((credit.loss_weight * credit.advantage).view(-1, 2) * (chosen - chances)).sum(0)


@cache
def _batch(arms: Sequence[Arms], late: bool) -> TrainingBatch:
    attempts = tuple(_attempt(chosen, member, late) for member, chosen in enumerate(arms))
    return assemble(select_trainable([Group(0, Task("bandit", ()), attempts)], {}).samples, pack_prefix_tree)


def _attempt(arms: Arms, member: int, late: bool) -> Trajectory:
    """What the world says never depends on the arm."""
    earned = float(arms[0])
    turns = tuple(
        Turn(
            index=index,
            parent=index - 1 if index else None,
            new_ids=(index,),
            action_ids=(arm,),
            logprobs=(0.0,),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(str(arm)), str(arm)),
            observation=(Message.user("again"),),
            rewards={"earned": 0.0 if late or index else earned},
        )
        for index, arm in enumerate(arms)
    )
    rewards = {"earned": earned} if late else {}
    return Trajectory(AttemptId("bandit", "bandit", 0, member), "bandit", turns, Status.COMPLETED, rewards=rewards)


def lines(first: float, last: float) -> Iterator[tuple[str, ...]]:
    """A row of the table for each algorithm; ratios are to GRPO."""
    grpo = noise(ALGORITHMS["grpo"], first, last).over_signal
    for name in (*OF_TRAJECTORIES, *OF_TURNS):
        found = noise(ALGORITHMS[name], first, last)
        late = noise(ALGORITHMS[name], first, last, late=True).over_signal
        by_turn = (found.variance / found.mean.square().sum()).tolist()
        credit = "turns" if name in OF_TURNS else "trajectories"
        yield (name, credit, *(f"{x:.3f}" for x in (*by_turn, found.over_signal, found.over_signal / grpo, late)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=float, default=0.5, help="probability of arm 1 in the first turn")
    parser.add_argument("--last", type=float, default=0.5, help="probability of arm 1 in the last turn")
    given = parser.parse_args()
    title = f"variance of the gradient / squared mean, groups of {ATTEMPTS}, pi(1) = {given.first:g}, {given.last:g}"
    table = Table(
        "algorithm", "credit of", "first turn", "last turn", "both", "to grpo", "paid at the end", title=title
    )
    for line in lines(given.first, given.last):
        table.add_row(*line)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
