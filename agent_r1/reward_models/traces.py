"""Recorded attempts as examples for a reward model, with their targets and token sequences.

The tokens are the recorded tokens. Nothing is tokenized again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agent_r1.core.errors import InvalidInput
from agent_r1.core.suggest import suggest
from agent_r1.core.trajectory import STATUS_POLICY, Trajectory
from agent_r1.core.weighted_rewards import total_reward, weighted_rewards
from agent_r1.data import TokenSequence, TurnPlace, pack_causal
from agent_r1.store import RunReader


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded attempt. ``target`` is its recorded reward, and ``group`` is (index of the run, id of the group)."""

    trajectory: Trajectory
    group: tuple[int, int]
    target: float


@dataclass(frozen=True, slots=True)
class TraceSplit:
    """Traces in two parts: for training, and held out. All traces of one task are in the same part."""

    training: tuple[Trace, ...]
    held_out: tuple[Trace, ...]


def read_traces(runs: Sequence[Path], reward: str) -> tuple[Trace, ...]:
    """Return the attempts in ``runs`` with the value of one reward. Attempts without this value, or with a status that
    does not allow training, are left out.

    ``reward`` is the name of the reward, or "" for the weighted sum of all rewards. Raise InvalidInput if no attempt is
    left, or if the policy saw images.
    """
    traces: list[Trace] = []
    names: set[str] = set()
    for index, folder in enumerate(runs):
        with closing(RunReader(folder)) as reader:
            weights = reader.config().get("reward_weights", {})
            for trajectory in reader.trajectories():
                if not _is_usable(trajectory):
                    continue
                if trajectory.has_images:
                    got, do = f"{folder}, whose attempts have images", "name runs without: reward models read only text"
                    raise InvalidInput("run", got=got, do=do)
                values = {one.name: 0.0 for one in weighted_rewards(trajectory, {})}
                for one in weighted_rewards(trajectory, {}):
                    values[one.name] += one.value
                names |= values.keys()
                target = values.get(reward) if reward else total_reward(trajectory, weights)
                if target is not None:
                    traces.append(Trace(trajectory, (index, trajectory.attempt.group_id), target))
    if not traces:
        do = f"{suggest(reward, names)} the runs have: {', '.join(sorted(names)) or 'no scored attempts'}".strip()
        raise InvalidInput("reward", got=repr(reward), do=do)
    return tuple(traces)


def _is_usable(trajectory: Trajectory) -> bool:
    return STATUS_POLICY[trajectory.status] == "train" and any(turn.action_ids for turn in trajectory.turns)


def split_by_task(traces: Sequence[Trace], held_out: float, seed: int) -> TraceSplit:
    """Divide traces by task into two parts: traces for training, and held-out traces.

    The argument ``held_out`` is the approximate share of tasks in the second part. The choice of the part depends only
    on the id of the task, on this share and on ``seed``. Raise InvalidInput if a part is empty.
    """
    parts: tuple[list[Trace], list[Trace]] = ([], [])
    for trace in traces:
        parts[_place(trace.trajectory.task_id, seed) < held_out].append(trace)
    if not all(parts):
        tasks = len({trace.trajectory.task_id for trace in traces})
        raise InvalidInput("held_out", got=f"{held_out:g} of {tasks} tasks", do="give runs with more tasks")
    return TraceSplit(tuple(parts[0]), tuple(parts[1]))


def draw_traces(traces: Sequence[Trace], most: int, seed: int) -> tuple[Trace, ...]:
    """Draw random tasks one by one, and return all traces of the drawn tasks.

    Drawing stops when the number of drawn traces reaches the limit ``most``. The traces of the last task are all in the
    result, so the result can exceed the limit. If ``most`` is 0, return all ``traces``.
    """
    if most == 0 or len(traces) <= most:
        return tuple(traces)
    tasks = sorted({trace.trajectory.task_id for trace in traces})
    random.Random(seed).shuffle(tasks)
    by_task: dict[str, list[Trace]] = {}
    for trace in traces:
        by_task.setdefault(trace.trajectory.task_id, []).append(trace)
    drawn: list[Trace] = []
    for task in tasks:
        if len(drawn) >= most:
            break
        drawn += by_task[task]
    return tuple(drawn)


def _place(task: str, seed: int) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on the id of a task and on the seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}|{task}".encode()).digest()[:6]) / 2**48


@dataclass(frozen=True, slots=True, eq=False)
class PackedTraces:
    """Token sequences of R traces (recorded attempts), with N action tokens in S turns.

    Turns without action tokens are not counted, and have no index.

    Attributes:
        sequences: the tokens, as the models read them.
        trace_of_turn: (S,) the index of each turn's trace.
        turn_of_token: (N,) the index of each action token's turn, from 0 to S - 1.
        last_turn: (R,) the index of each trace's last turn, from 0 to S - 1.
    """

    sequences: tuple[TokenSequence, ...]
    trace_of_turn: Tensor
    turn_of_token: Tensor
    last_turn: Tensor


def pack_traces(trajectories: Sequence[Trajectory]) -> PackedTraces:
    """Return the token sequences of trajectories. Each trajectory needs a turn with action tokens."""
    sequences: list[TokenSequence] = []
    trace_of_turn: list[int] = []
    turn_of_token: list[int] = []
    last_turn: list[int] = []
    for number, trajectory in enumerate(trajectories):
        places: list[TurnPlace] = []
        for turn in trajectory.turns:
            if turn.action_ids:
                trace_of_turn.append(number)
            places.append(TurnPlace(len(trace_of_turn) - 1, len(turn_of_token)))
            turn_of_token += [len(trace_of_turn) - 1] * len(turn.action_ids)
        sequences += pack_causal(trajectory, number, places)
        last_turn.append(len(trace_of_turn) - 1)
    return PackedTraces(
        tuple(sequences), torch.tensor(trace_of_turn), torch.tensor(turn_of_token), torch.tensor(last_turn)
    )


def with_contrast(traces: Sequence[Trace]) -> tuple[Trace, ...]:
    """Return the traces without the groups in which all targets are equal. A loss over pairs cannot use such groups."""
    targets: dict[object, set[float]] = {}
    for trace in traces:
        targets.setdefault(trace.group, set()).add(trace.target)
    return tuple(trace for trace in traces if len(targets[trace.group]) > 1)


def batches(traces: Sequence[Trace], size: int, by_group: bool, shuffle: random.Random) -> Iterator[list[Trace]]:
    """Yield the traces once, in random order, in batches of at least ``size`` traces; the last batch can be smaller.

    If ``by_group`` is true, all traces of a group are in one batch.
    """
    units: dict[object, list[Trace]] = {}
    for number, trace in enumerate(traces):
        units.setdefault(trace.group if by_group else number, []).append(trace)
    order = list(units.values())
    shuffle.shuffle(order)
    batch: list[Trace] = []
    for unit in order:
        batch += unit
        if len(batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch
