"""A task set: an environment, its tasks by split, their scorers and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1.core.environment import Env
from agent_r1.core.reference_solution import ReferenceSolutions
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Scorer, Trajectory


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A ready world, as the doors use it.

    ``tasks(split)`` gives the tasks of a split. ``evaluation`` names the splits of the table,
    ``validation`` the split that chooses the checkpoint (None: the last step is kept).
    ``baselines`` are other environments over the same tasks, by the name of their row in the table
    (``naive-rag``). ``variants`` are further splits on which an agent may be tried, with the environment of each.
    ``measures`` gives further figures of scored attempts, by name; one that they say nothing of is left out.
    ``sandbox`` says in which level of it, and which layers, code runs that the policy wrote; None where none does.
    ``whole`` names the split of all tasks, where a world is made of a file: for evaluating what was not trained on it.
    ``recipe`` holds configuration defaults by dotted key, e.g.
    ``{"learner.learning_rate": 1e-3}``. ``solutions`` gives the right and wrong ways to act in a task, which
    ``agent-r1 check`` plays; None where a world cannot be checked.
    """

    name: str
    env: Env
    tasks: Callable[[str], Sequence[Task]]
    scorers: tuple[Scorer, ...]
    baselines: Mapping[str, Env] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    evaluation: tuple[str, ...] = ("test",)
    validation: str | None = None
    whole: str | None = None
    retrieval: Callable[[str], Mapping[str, float]] | None = None
    solutions: Callable[[Task], ReferenceSolutions] | None = None
    variants: Mapping[str, Env] = field(default_factory=dict)
    measures: Callable[[Sequence[Trajectory]], Mapping[str, float]] | None = None
    sandbox: str | None = None

    def env_for_split(self, split: str) -> Env:
        """The environment that the tasks of a split are lived in."""
        return self.variants.get(split, self.env)
