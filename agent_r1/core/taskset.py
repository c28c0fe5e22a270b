"""A task set: an environment, tasks by split, scorers and default settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1.core.environment import Env
from agent_r1.core.reference_solution import ReferenceSolutions
from agent_r1.core.task import AgentFunction, Task
from agent_r1.core.trajectory import Scorer, Trajectory


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A benchmark: an environment with tasks and scorers.

    Attributes:
        name: the name on the command line.
        env: the environment.
        tasks: returns the tasks of a split.
        scorers: compute the rewards of an attempt.
        rewards: the names of all rewards, including process rewards; () if the names are known only after scoring.
        baselines: the environments of other methods on the same tasks, by the name of the method (``naive-rag``).
        recipe: default settings by dotted key, for example ``{"trainer.learning_rate": 1e-3}``.
        evaluation: the splits that an evaluation reports.
        validation: the split that selects the best checkpoint; if None, the weights of the last step are kept.
        whole: the name of the split with all tasks, if all tasks come from one file; None otherwise.
        retrieval: returns measures of the retriever's quality on a split, by name.
        solutions: returns reference solutions of a task, for ``agent-r1 check``.
        kind: returns the kind of a training task, for example its number of hops. The tasks of each kind are spread
            evenly over an epoch, so that all steps get about the same mixture. None: all tasks are of one kind.
        variants: environments by split, for the splits that do not use ``env``.
        measures: computes, from scored attempts, measures in addition to the rewards, by name. None: no such measures.
        agent: an agent that acts instead of the agent loop, and calls the policy over HTTP; None for the agent loop.
        sandbox: the isolation of code that the policy writes, as text; None if no such code is executed.
        file: the Python file of the user that defines the task set; None if no file of the user defines the task set.
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
    kind: Callable[[Task], int] | None = None
    variants: Mapping[str, Env] = field(default_factory=dict)
    measures: Callable[[Sequence[Trajectory]], Mapping[str, float]] | None = None
    sandbox: str | None = None
    rewards: tuple[str, ...] = ()
    agent: AgentFunction | None = None
    file: Path | None = None

    def env_for_split(self, split: str) -> Env:
        return self.variants.get(split, self.env)
