"""Evaluation of a reward model on held-out traces: how well its scores separate successes from failures."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.core.task import Task
from agent_r1.core.trajectory import STATUS_POLICY, Trajectory, total_reward, weighted_rewards
from agent_r1.data.sequences import TokenSequence, TurnPlace, pack_causal
from agent_r1.reward_models.config import RewardModelConfig
from agent_r1.rewards.scoring import grounded, logprob
from agent_r1.store.reader import RunReader

RESAMPLES = 500
"""The number of bootstrap samples for a confidence interval."""

BINS = 10
"""To measure the calibration, the predictions from 0 to 1 are grouped into this number of bins of equal width."""


@dataclass(frozen=True, slots=True)
class Separation:
    """How well a score separates successes from failures.

    Attributes:
        auc: the probability that a random success has a higher score than a random failure; ties count one half.
        low, high: the 95 % interval of ``auc``, by a bootstrap over tasks.
        within_tasks: ``auc`` over pairs of a success and a failure at the same task; NaN without such pairs.
    """

    auc: float
    low: float
    high: float
    within_tasks: float


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """The traces whose predictions are in one interval: their count, mean prediction and share of successes."""

    count: int
    prediction: float
    successes: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The quality of a reward model on held-out traces."""

    traces: int
    tasks: int
    successes: float  # the share of successes
    model: Separation  # how well the reward model separates successes from failures
    baselines: Mapping[str, Separation]  # how well each score in ``BASELINES`` separates successes from failures
    # the share of correct predictions; None for the loss "pairs". For the loss "outcome", success is predicted if the
    # predicted probability is above 0.5. For the loss "regression", success is predicted if the predicted reward is
    # above the setting ``success``
    accuracy: float | None
    majority: float  # the accuracy of always predicting the more frequent outcome
    # the expected calibration error. The error of one bin is the distance between its mean prediction and its share of
    # successes. The errors of all bins are averaged, weighted by the numbers of traces. None if the loss is not
    # "outcome"
    calibration_error: float | None
    # the traces, grouped by their predicted probability into ``BINS`` intervals of equal width. Empty intervals are
    # left out. () if the loss is not "outcome"
    bins: tuple[CalibrationBin, ...]


BASELINES: Mapping[str, Callable[[Trajectory], float]] = {
    "tokens": lambda trajectory: sum(len(turn.new_ids) + len(turn.action_ids) for turn in trajectory.turns),
    "turns": lambda trajectory: len(trajectory.turns),
    "calls": lambda trajectory: sum(len(turn.results) for turn in trajectory.turns),
    "grounded": lambda trajectory: grounded(trajectory, Task(trajectory.task_id, ())),
    "log-probability": lambda trajectory: logprob(trajectory, Task(trajectory.task_id, ())),
    "answer's log-probability": lambda one: fmean(next(t.logprobs for t in reversed(one.turns) if t.logprobs)),
}
"""Scores of an attempt that need no model.

- grounded: whether a tool result contains the attempt's final answer.
- log-probability: the mean log-probability of the sampled tokens.
- answer's log-probability: the mean log-probability of the tokens of the last action.
"""


def evaluate_scores(
    predictions: Sequence[float],
    successes: Sequence[bool],
    tasks: Sequence[str],
    baselines: Mapping[str, Sequence[float]],
    config: RewardModelConfig,
) -> Evaluation:
    """Return the evaluation of predictions on held-out traces. All sequences have one entry per trace.

    If ``config.loss`` is "regression", ``predictions`` are rewards. Otherwise, ``predictions`` are probabilities.
    ``baselines`` are other scores, by name.
    """
    labels = torch.tensor(successes)
    share = float(labels.double().mean())
    bins = tuple(_calibration_bins(predictions, successes)) if config.loss == "outcome" else ()
    errors = [one.count * abs(one.prediction - one.successes) for one in bins]
    limit = config.success if config.loss == "regression" else 0.5
    right = [(value > limit) == success for value, success in zip(predictions, successes, strict=True)]
    return Evaluation(
        traces=len(predictions),
        tasks=len(set(tasks)),
        successes=share,
        model=separation(predictions, labels, tasks, config.seed),
        baselines={name: separation(scores, labels, tasks, config.seed) for name, scores in baselines.items()},
        accuracy=None if config.loss == "pairs" else fmean(right),
        majority=max(share, 1 - share),
        calibration_error=math.fsum(errors) / len(predictions) if errors else None,
        bins=bins,
    )


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def separation(scores: Sequence[float], labels: Tensor, tasks: Sequence[str], seed: int) -> Separation:
    """Return how well ``scores`` separate traces with the label True from traces with the label False.

    Each trace has a score, a label and the name of its task. The confidence interval is from a bootstrap that draws
    tasks, each with all its traces, because the traces of one task are not independent.
    """
    values = torch.tensor(scores, dtype=torch.float64)
    indices: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        indices.setdefault(task, []).append(index)
    rows = [torch.tensor(one) for one in indices.values()]
    generator = random.Random(seed)
    drawn = (torch.cat(generator.choices(rows, k=len(rows))) for _ in range(RESAMPLES))
    resampled = sorted(area for one in drawn if not math.isnan(area := auc(values[one], labels[one])))
    low, high = (resampled[int(q * (len(resampled) - 1))] if resampled else math.nan for q in (0.025, 0.975))
    return Separation(auc(values, labels), low, high, _auc_within_tasks(values, labels, rows))


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve: the probability that a success has a higher score than a failure.

    Ties count one half. The result is NaN if there is no success or no failure. ``scores`` and ``labels`` (True for a
    success) have the shape (R,).

    Let r be the ranks of the P successes among all scores, and N the number of failures. The area is (sum r - P (P + 1)
    / 2) / (P N) (Mann-Whitney).
    """
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        return math.nan
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2  # tied scores share their mean rank
    return float((ranks[place][labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _auc_within_tasks(scores: Tensor, labels: Tensor, rows: Sequence[Tensor]) -> float:
    right = pairs = 0.0
    for indices in rows:
        count = float(labels[indices].sum() * (~labels[indices]).sum())
        if count:
            right, pairs = right + count * auc(scores[indices], labels[indices]), pairs + count
    return right / pairs if pairs else math.nan


def _calibration_bins(predictions: Sequence[float], successes: Sequence[bool]) -> list[CalibrationBin]:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for prediction, success in zip(predictions, successes, strict=True):
        bins.setdefault(min(max(int(prediction * BINS), 0), BINS - 1), []).append((prediction, success))
    return [
        CalibrationBin(len(pairs), fmean(value for value, _ in pairs), fmean(success for _, success in pairs))
        for _, pairs in sorted(bins.items())
    ]


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
                if STATUS_POLICY[trajectory.status] != "train" or not any(turn.action_ids for turn in trajectory.turns):
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
    return int.from_bytes(hashlib.sha256(f"{seed}|{task}".encode()).digest()[:6]) / 2**48


@dataclass(frozen=True, slots=True, eq=False)
class PackedTraces:
    """Token sequences of R traces (recorded attempts), with N action tokens in S turns.

    Turns without action tokens are not counted, and have no index.
    """

    sequences: tuple[TokenSequence, ...]  # the tokens, as the models read them
    trace_of_turn: Tensor  # (S,) the index of each turn's trace
    turn_of_token: Tensor  # (N,) the index of each action token's turn, from 0 to S - 1
    last_turn: Tensor  # (R,) the index of each trace's last turn, from 0 to S - 1


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
