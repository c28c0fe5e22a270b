"""A task set: an environment, tasks by split, scorers and default settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1.core.environment import Env
from agent_r1.core.errors import EngineError
from agent_r1.core.messages import Message, Text, ToolCall
from agent_r1.core.task import AgentFunction, Task
from agent_r1.core.trajectory import Scorer, Trajectory

Responder = Callable[[tuple[Message, ...], int], Message]
"""A function (conversation so far, index of the turn from 0) -> next message of the assistant."""


@dataclass(frozen=True, slots=True)
class ReferenceSolution:
    """One way to solve a task, right or wrong. The messages come from ``respond``, and not from the policy."""

    name: str
    respond: Responder


@dataclass(frozen=True, slots=True)
class ReferenceSolutions:
    """The reference solutions of one task, for ``agent-r1 check``. Expect no reward that a wrong one can also earn."""

    gold: tuple[ReferenceSolution, ...]  # right solutions: each must reach every expected reward
    wrong: tuple[ReferenceSolution, ...]  # each must stay below every expected reward
    expected_rewards: Mapping[str, float]


def tool_call(name: str, **arguments: Any) -> Message:
    """Return an assistant message with one tool call: ``tool_call("search", query="Alba")``."""
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))


def script(*messages: Message) -> Responder:
    """Return a responder that sends ``messages``, one per turn, and raises EngineError after the last message."""

    def respond(conversation: tuple[Message, ...], turn: int) -> Message:
        if turn >= len(messages):
            raise EngineError(f"the script has {len(messages)} turns, and the episode goes on after them")
        return messages[turn]

    return respond


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A benchmark: an environment with tasks and scorers."""

    name: str  # on the command line
    env: Env
    # split -> its tasks; with several environments also "calc/test" -> the tasks of the split "test" in "calc"
    tasks: Callable[[str], Sequence[Task]]
    scorers: tuple[Scorer, ...]
    baselines: Mapping[str, Env] = field(default_factory=dict)  # other methods on the same tasks, such as naive-rag
    recipe: Mapping[str, Any] = field(default_factory=dict)  # settings by dotted key: {"trainer.learning_rate": 1e-3}
    evaluation: tuple[str, ...] = ("test",)  # the splits that an evaluation reports
    validation: str | None = None  # the split that selects the best checkpoint; None: keep the weights of the last step
    whole: str | None = None  # the split with all tasks, if there is one
    retrieval: Callable[[str], Mapping[str, float]] | None = None  # split -> measures of the retriever's quality
    solutions: Callable[[Task], ReferenceSolutions] | None = None  # for agent-r1 check
    # the kind of a training task, for example its number of hops; each kind is spread evenly over an epoch
    kind: Callable[[Task], int] | None = None
    # the subset of a validation task, for example "three-hop"; validation also reports the mean of each subset
    subset: Callable[[Task], str] | None = None
    variants: Mapping[str, Env] = field(default_factory=dict)  # environments of splits that do not use ``env``
    measures: Callable[[Sequence[Trajectory]], Mapping[str, float]] | None = None  # in addition to the rewards
    sandbox: str | None = None  # the isolation of code that the policy writes; None: no such code is executed
    rewards: tuple[str, ...] = ()  # the names of all rewards; (): known only after scoring
    agent: AgentFunction | None = None  # acts instead of the agent loop, and calls the policy over HTTP
    file: Path | None = None  # the user's Python file that defines the task set
    # local data of the parts of a mixture, such as "film.data"
    part_data: Mapping[str, Path] = field(default_factory=dict)
    # the settings on which the parts of a mixture disagree, such as {"steps": "wiki 20, sums 40"}
    disputed: Mapping[str, str] = field(default_factory=dict)
    unsolved: tuple[str, ...] = ()  # the parts of a mixture whose tasks have no reference solutions

    def env_for_split(self, split: str) -> Env:
        return self.variants.get(split, self.env)
