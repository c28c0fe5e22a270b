"""Which tasks a run trains on, in which order: all in turn, or those from which a group is likely to learn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import pstdev

import torch

from agent_r1.algorithms.ops import MIN_STD
from agent_r1.core.task import Task
from agent_r1.rollout.collector import GroupRequest
from agent_r1.trainer.updater import SelectedGroup
from agent_r1.training.config import TrainConfig

Kind = tuple[str, int]
"""The environment of a task, and its kind there (``TaskSet.kind``)."""


def group_requests(
    tasks: Sequence[Task], config: TrainConfig, first: int = 0, kind: Callable[[Task], int] | None = None
) -> Iterator[GroupRequest]:
    """Yield group requests without an end, with ids from ``first`` on.

    Each epoch has all tasks in a random order, which depends only on seed and epoch. The tasks of each ``kind``
    of each environment are spread evenly.
    """
    kinds = kinds_of(tasks, kind)
    for epoch in count(first // len(tasks)):
        permutation = _permutation(config.seed, epoch, kinds)
        for group_id, index in enumerate(permutation, start=epoch * len(tasks)):
            if group_id >= first:
                yield GroupRequest(group_id, tasks[index], config.group_size)


def kinds_of(tasks: Sequence[Task], kind: Callable[[Task], int] | None) -> list[Kind]:
    return [(task.env, 0 if kind is None else kind(task)) for task in tasks]


def _permutation(seed: int, epoch: int, kinds: Sequence[Kind]) -> list[int]:
    # A random order, in which the tasks of each kind are spread evenly.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    permutation = torch.randperm(len(kinds), generator=generator).tolist()
    total, seen, place = Counter(kinds), Counter[Kind](), dict[int, tuple[float, Kind]]()
    for index in permutation:
        kind = kinds[index]
        place[index] = ((seen[kind] + 0.5) / total[kind], kind)
        seen[kind] += 1
    return sorted(permutation, key=place.__getitem__)


TASK_HALF_LIFE, KIND_HALF_LIFE = 2.0, 10.0
"""The age at which an outcome counts half, because the policy has changed: in passes over all tasks for a task, so that
dead tasks come back after some passes however many tasks there are; in steps for a kind."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Discounted numbers of groups whose rewards differed, and were equal, at ``time``, measured in half-lives."""

    differing: float = 0.0
    equal: float = 0.0
    time: float = 0.0

    def at(self, time: float) -> Outcomes:
        factor = 0.5 ** (time - self.time)
        return Outcomes(factor * self.differing, factor * self.equal, time)

    def add(self, differs: bool, time: float) -> Outcomes:
        now = self.at(time)
        return Outcomes(now.differing + differs, now.equal + (not differs), time)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The state of an :class:`AdaptiveSampler`, which each checkpoint holds."""

    step: int = 0
    seen: int = 0  # tasks that were drawn or skipped
    tasks: Mapping[int, Outcomes] = field(default_factory=dict)  # by the index of the task
    kinds: Mapping[int, Outcomes] = field(default_factory=dict)  # by the index of the kind, in sorted order


class AdaptiveSampler:
    """Draws tasks in proportion to the probability that the rewards of a group at the task differ.

    Only such a group teaches a group-relative algorithm. The tasks pass by in the order of :func:`group_requests`. Of
    each, the probability is drawn from a beta distribution (Thompson sampling): it has the counts of the task's own
    groups, and as its prior one group with the mean of the task's kind. The task is taken with this probability
    divided by the largest mean of a kind. So tasks that are always solved or never are mostly skipped, and return
    when their outcomes are old.

    A task is drawn when its group may start. In synchronous training, the outcomes of all earlier steps are known then,
    so a resumed run draws the same tasks.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: TrainConfig,
        kind: Callable[[Task], int] | None = None,
        state: SamplingState | None = None,
    ) -> None:
        self._tasks, self._config = tasks, config
        self._kinds = kinds_of(tasks, kind)
        self._kind_index = {one: index for index, one in enumerate(sorted(set(self._kinds)))}
        self.state = state or SamplingState()
        self._epoch, self._order = -1, list[int]()
        self._drawn: dict[int, int] = {}  # the index of the task of each group that no step has taken yet

    def requests(self, first: int = 0) -> Iterator[GroupRequest]:
        """Yield group requests without an end, with ids from ``first`` on. Each draws its task."""
        for group_id in count(first):
            index = self._drawn[group_id] = self._draw(group_id)
            yield GroupRequest(group_id, self._tasks[index], self._config.group_size)

    def on_step_end(self, step: int, batch: Sequence[SelectedGroup]) -> None:
        """Count the outcomes of the groups that ``step`` took."""
        tasks, kinds = dict(self.state.tasks), dict(self.state.kinds)
        for selected in sorted(batch, key=lambda one: one.group.group_id):
            totals, index = [one.total for one in selected.selection.samples], self._drawn.pop(selected.group.group_id)
            if len(totals) < 2:
                continue
            differs = pstdev(totals) > MIN_STD
            kind = self._kind_index[self._kinds[index]]
            tasks[index] = tasks.get(index, Outcomes()).add(differs, self._task_time)
            kinds[kind] = kinds.get(kind, Outcomes()).add(differs, step / KIND_HALF_LIFE)
        self.state = SamplingState(step, self.state.seen, tasks, kinds)

    def mean(self, kind: Kind) -> float:
        """Return the probability that the rewards of a group at a task of this kind differ."""
        known = self.state.kinds.get(self._kind_index[kind], Outcomes()).at(self.state.step / KIND_HALF_LIFE)
        return (1 + known.differing) / (2 + known.differing + known.equal)  # uniform prior

    def _draw(self, group_id: int) -> int:
        generator = random.Random(f"{self._config.seed}|task of group|{group_id}")
        largest = max(map(self.mean, self._kind_index))
        for _ in self._tasks:  # at most an epoch, so that a draw ends
            index = self._next()
            mean = self.mean(self._kinds[index])
            known = self.state.tasks.get(index, Outcomes()).at(self._task_time)
            drawn = generator.betavariate(mean + known.differing, 1 - mean + known.equal)
            if generator.random() * largest < drawn:
                break
        return index

    @property
    def _task_time(self) -> float:
        return self.state.seen / len(self._tasks) / TASK_HALF_LIFE

    def _next(self) -> int:
        epoch, place = divmod(self.state.seen, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _permutation(self._config.seed, epoch, self._kinds)
        self.state = replace(self.state, seen=self.state.seen + 1)
        return self._order[place]
