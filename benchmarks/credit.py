"""The variance of the policy gradient under different advantage estimators, computed exactly.

    python benchmarks/credit.py                          the table
    python benchmarks/credit.py --first 0.2 --last 0.5   another policy

A bandit of two turns: in each turn the policy chooses one of two arms, and only the choice of the first turn earns a
reward, 1 or 0. The policy is a table of one logit per turn, so the true gradient of its last logit is 0. Nothing is
sampled: every outcome of a group of attempts is weighted by its probability, so mean and variance are exact.

Estimators differ in scale. The noise is therefore given as the variance of the gradient (of both logits together)
divided by the squared length of its mean: the number of groups over which the gradient has to be averaged until noise
equals signal.
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
from agent_r1.algorithms.types import ModelOutputs, StateValues
from agent_r1.core.inference import PolicyVersionSpan
from agent_r1.core.messages import Action, Message
from agent_r1.core.task import Task
from agent_r1.core.trajectory import AttemptId, Group, Status, Trajectory, Turn
from agent_r1.data.batch import TrainingBatch, assemble_batch
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable

ATTEMPTS = 4
"""Attempts per group."""

TRAJECTORY_LEVEL = ("grpo", "dr-grpo", "rloo", "reinforce++-baseline")
"""Algorithms that give all turns of an attempt the same advantage."""

TURN_LEVEL = ("gigpo", "gtpo", "process-grpo", "reinforce", "ppo-turn")
"""Algorithms that give each turn its own advantage."""

Arms = tuple[int, int]
"""The choices of an attempt: 0 or 1 in each of its two turns."""

ALL_ARMS: tuple[Arms, ...] = tuple(product((0, 1), (0, 1)))


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Mean (2,) and variance (2,) over groups of the gradient with respect to the logits of the two turns."""

    mean: Tensor
    variance: Tensor

    @property
    def over_signal(self) -> float:
        """The variance of both divided by the squared length of the mean."""
        return float(self.variance.sum() / self.mean.square().sum())


def gradient_noise(algorithm: Algorithm, first: float, last: float, *, late: bool = False) -> GradientNoise:
    """Compute the noise for a policy that chooses arm 1 with probability ``first`` and ``last``.

    If ``late``, the reward of the first turn is given at the end, as an outcome of the whole episode.
    """
    probabilities = torch.tensor([first, last], dtype=torch.float64)  # (2,)
    group_probabilities, gradients = [], []
    for arms in combinations_with_replacement(ALL_ARMS, ATTEMPTS):
        chosen = torch.tensor(arms, dtype=torch.float64)  # (ATTEMPTS, 2)
        of_arms = torch.where(chosen > 0, probabilities, 1 - probabilities)
        group_probabilities.append(_orders(arms) * of_arms.prod())
        gradients.append(_gradient(algorithm, _batch(arms, late), chosen, probabilities))
    weight, gradient = torch.stack(group_probabilities)[:, None], torch.stack(gradients)  # (groups, 1), (groups, 2)
    mean = (weight * gradient).sum(0)
    return GradientNoise(mean, (weight * (gradient - mean).square()).sum(0))


def _orders(arms: Sequence[Arms]) -> int:
    """Return the number of orders of the attempts of a group; no estimator depends on the order."""
    return factorial(len(arms)) // prod(factorial(count) for count in Counter(arms).values())


def _gradient(algorithm: Algorithm, batch: TrainingBatch, chosen: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient (2,) of the objective with respect to the logits: that of log pi(arm) is arm - pi(1).

    The critic, if there is one, knows the true values.
    """
    values = torch.tensor([probabilities[0], 0.0], dtype=torch.float64).repeat(ATTEMPTS)
    outputs = ModelOutputs(
        values=StateValues(values, torch.zeros_like(values)), reference_logprobs=batch.sampler_logprobs
    )
    weights = algorithm.compute_token_weights(batch, outputs)
    return ((weights.loss_weight * weights.advantage).view(-1, 2) * (chosen - probabilities)).sum(0)


@cache
def _batch(arms: Sequence[Arms], late: bool) -> TrainingBatch:
    attempts = tuple(_attempt(chosen, index, late) for index, chosen in enumerate(arms))
    return assemble_batch(select_trainable([Group(0, Task("bandit", ()), attempts)], {}).samples, pack_prefix_tree)


def _attempt(arms: Arms, index: int, late: bool) -> Trajectory:
    """Return the trajectory of these choices. Observations do not depend on the arm."""
    reward = float(arms[0])
    turns = tuple(
        Turn(
            index=turn,
            parent=turn - 1 if turn else None,
            new_ids=(turn,),
            action_ids=(arm,),
            logprobs=(0.0,),
            version_spans=(PolicyVersionSpan(0, 0),),
            finish_reason="stop",
            action=Action(Message.assistant(str(arm)), str(arm)),
            observation=(Message.user("again"),),
            rewards={"reward": 0.0 if late or turn else reward},
        )
        for turn, arm in enumerate(arms)
    )
    rewards = {"reward": reward} if late else {}
    return Trajectory(AttemptId("bandit", "bandit", 0, index), "bandit", turns, Status.COMPLETED, rewards=rewards)


def table_rows(first: float, last: float) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each algorithm; ratios are relative to GRPO."""
    grpo = gradient_noise(ALGORITHMS["grpo"], first, last).over_signal
    for name in (*TRAJECTORY_LEVEL, *TURN_LEVEL):
        noise = gradient_noise(ALGORITHMS[name], first, last)
        late = gradient_noise(ALGORITHMS[name], first, last, late=True).over_signal
        by_turn = (noise.variance / noise.mean.square().sum()).tolist()
        level = "turn" if name in TURN_LEVEL else "trajectory"
        yield (name, level, *(f"{x:.3f}" for x in (*by_turn, noise.over_signal, noise.over_signal / grpo, late)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=float, default=0.5, help="probability of arm 1 in the first turn")
    parser.add_argument("--last", type=float, default=0.5, help="probability of arm 1 in the last turn")
    options = parser.parse_args()
    title = (
        f"variance of the gradient / squared mean, groups of {ATTEMPTS}, pi(1) = {options.first:g}, {options.last:g}"
    )
    table = Table(
        "algorithm", "advantage per", "first turn", "last turn", "both", "relative to grpo", "late reward", title=title
    )
    for row in table_rows(options.first, options.last):
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
