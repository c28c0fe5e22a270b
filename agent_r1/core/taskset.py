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
"""A function (conversation so far, index of the turn) -> next message of the assistant. The first turn has index 0."""


@dataclass(frozen=True, slots=True)
class ReferenceSolution:
    """One way to solve a task, right or wrong. The messages come from ``respond``, and not from the policy.

    Example:
        ReferenceSolution(name="guess", respond=script(tool_call("search", query="Alba"), Message.assistant("Bruno")))
    """

    name: str
    respond: Responder


@dataclass(frozen=True, slots=True)
class ReferenceSolutions:
    """The reference solutions of one task, for ``agent-r1 check``.

    Attributes:
        gold: right solutions. Each must reach every number in ``expected_rewards``.
        wrong: wrong solutions. Each must stay below every number in ``expected_rewards``.
        expected_rewards: a number for each reward, by name. The sum of the reward over an episode is compared with this
            number. Leave out rewards that a wrong solution can also earn, such as a reward for any search.

    Example:
        ReferenceSolutions(
            gold=(ReferenceSolution("answer", script(Message.assistant("<answer>Bruno</answer>"))),),
            wrong=(ReferenceSolution("no answer", script(Message.assistant("I do not know."))),),
            expected_rewards={"em": 1.0},
        )
    """

    gold: tuple[ReferenceSolution, ...]
    wrong: tuple[ReferenceSolution, ...]
    expected_rewards: Mapping[str, float]


def tool_call(name: str, **arguments: Any) -> Message:
    """Return an assistant message with one tool call: ``tool_call("search", query="Alba")``."""
    return Message("assistant", (Text(""),), (ToolCall("call_0", name, arguments, ""),))


def script(*messages: Message) -> Responder:
    """Return a responder that sends ``messages``, one per turn, whatever the conversation is.

    The responder raises EngineError if the episode goes on after the last message.
    """

    def respond(conversation: tuple[Message, ...], turn: int) -> Message:
        if turn >= len(messages):
            raise EngineError(f"the script has {len(messages)} turns, and the episode goes on after them")
        return messages[turn]

    return respond


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A benchmark: an environment with tasks and scorers.

    Attributes:
        name: the name on the command line.
        tasks: returns the tasks of a split.
        rewards: the names of all rewards, including process rewards; () if the names are known only after scoring.
        baselines: the environments of other methods on the same tasks, by the name of the method (``naive-rag``).
        recipe: default settings by dotted key, for example ``{"trainer.learning_rate": 1e-3}``.
        evaluation: the splits that an evaluation reports.
        validation: the split that selects the best checkpoint. None: keep the weights of the last step.
        whole: the split with all tasks; None if no split has all tasks.
        retrieval: returns measures of the retriever's quality on a split.
        solutions: returns reference solutions of a task, for ``agent-r1 check``.
        kind: returns the kind of a training task, for example its number of hops. Each kind is spread evenly over an
            epoch.
        variants: environments of certain splits, by split name. All other splits have the environment ``env``.
        measures: computes measures from scored attempts, in addition to the rewards.
        agent: an agent program that acts instead of the agent loop, and calls the policy over HTTP.
        sandbox: the isolation of code that the policy writes. None: no such code is executed.
        file: the user's Python file that defines the task set, if any.
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
