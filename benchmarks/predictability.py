"""The share of the variance of returns that a perfect critic would explain, beside the share that the run's critic did.

    agent-r1 train --taskset tinywiki --algorithm ppo --run runs/ppo
    python benchmarks/predictability.py runs/ppo

The state before a token is the question and all tokens of the attempt so far. Attempts of a group with equal states
differ in their returns by chance alone, so no critic explains more of the variance than

    1 - mean over tokens of Var(R | state) / Var(R)

Var(R | state) is estimated without bias (n - 1) among the attempts that share the state. States of one attempt only
say nothing and are left out; ``seen`` is the share of tokens that are not. With a discount or process rewards R stands
for the whole return all the same.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Trajectory
from agent_r1.data.batch import TrainingBatch, assemble_batch, segment_first, unique_ids
from agent_r1.data.sequences import pack_prefix_tree
from agent_r1.data.training_sample import select_trainable
from agent_r1.store.reader import RunReader

TURNS = 3
"""Turns that have a column."""


def step_batches(reader: RunReader) -> Iterator[tuple[int, TrainingBatch]]:
    """Yield each step and the attempts that were trained in it, as one batch."""
    steps = {fate.attempt: fate.step for fate in reader.fates() if fate.fate == "trained"}
    attempts: dict[int, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in reader.trajectories("train"):
        if step := steps.get(trajectory.attempt):
            attempts[step][trajectory.attempt.group_id].append(trajectory)
    weights = reader.config().get("reward_weights", {})
    for step, groups in sorted(attempts.items()):
        made = [Group(number, Task(found[0].task_id, ()), tuple(found)) for number, found in groups.items()]
        yield step, assemble_batch(select_trainable(made, weights).samples, pack_prefix_tree, reward_weights=weights)


def token_states(batch: TrainingBatch) -> Tensor:
    """Return a number for the state before each token, equal within a group if all earlier tokens are: (N,)."""
    numbers: dict[tuple[int, ...], int] = {}
    states, state, before = [], 0, (-1, -1)
    columns = (batch.ids, batch.token_turn, batch.token_trajectory, batch.token_group)
    for token, turn, trajectory, group in zip(*(column.tolist() for column in columns), strict=True):
        if trajectory != before[0]:
            state = numbers.setdefault((-1, group), len(numbers))
        elif turn != before[1]:  # an action that ended earlier leads to another state
            state = numbers.setdefault((state, -1), len(numbers))
        states.append(state)
        state, before = numbers.setdefault((state, token), len(numbers)), (trajectory, turn)
    return torch.tensor(states)


def explainable(states: Tensor, returns: Tensor) -> tuple[float, float]:
    """Return the share of the variance of ``returns`` that the states determine, and the share of tokens it is from."""
    unit = unique_ids(states)  # (n,) numbered from 0
    count = torch.bincount(unit).double()
    mean = torch.bincount(unit, returns) / count
    squares = torch.bincount(unit, (returns - mean[unit]).square())
    shared = count > 1
    within = (squares * count / (count - 1))[shared].sum() / count[shared].sum()
    return 1 - float(within / returns.var(correction=0)), float(count[shared].sum() / len(states))


def row(batch: TrainingBatch) -> Sequence[float]:
    """Return the explainable share over all tokens, the share of tokens seen, and the explainable share by turn."""
    states, returns = token_states(batch), batch.returns[batch.token_trajectory]
    turns = torch.arange(len(batch.turn_trajectory))  # (S,)
    index = turns - segment_first(batch.turn_trajectory)[batch.turn_trajectory]  # (S,) of the turn in its attempt
    begins = [batch.first_tokens[index == number] for number in range(TURNS)]
    by_turn = [explainable(states[tokens], returns[tokens])[0] for tokens in begins if len(tokens)]
    return [*explainable(states, returns), *by_turn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with several attempts per task")
    arguments = parser.parse_args()
    columns = ("step", "reward", "critic", "explainable", "seen", *(f"turn {number + 1}" for number in range(TURNS)))
    table = Table(*columns)
    with closing(RunReader(arguments.run)) as reader:
        explained = {step.step: step.values.get("critic/explained_variance") for step in reader.metrics()}
        for step, batch in step_batches(reader):
            critic = explained.get(step)
            shares = (f"{share:.2f}" for share in row(batch))
            shown = "-" if critic is None else f"{critic:.2f}"
            table.add_row(str(step), f"{float(batch.returns.mean()):.2f}", shown, *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
