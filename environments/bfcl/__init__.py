"""``bfcl``: single-turn questions of the Berkeley function calling leaderboard (package ``bfcl-eval``).

Each task has functions of its own. The agent calls those that the question needs, in one action. The calls are not run:
the package's checker compares them with its possible answers. The multi-turn questions are in ``multi_turn.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Action, Message, Text as Text, ToolCall, ToolResult, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.core.trajectory import Trajectory
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.tasksets.answers import reference
from agent_r1.tasksets.files import read_settings_file
from agent_r1.tools.tool_errors import malformed_call_result, unknown_tool_result
from environments.bfcl.package import (
    calls_are_correct,
    held_out,
    load_checker,
    questions,
    several_calls,
    tool_name,
    tool_spec,
)

CATEGORIES: Mapping[str, str] = {"simple": "simple_python", "multiple": "multiple", "parallel": "parallel"}
"""The categories of the package by split: one function and one call, several functions and one call, several calls of
one function."""

HELD_OUT = 40
"""The number of questions of each category that are never trained."""

SYSTEM = Message.system("Call the functions that the request needs, all in one message.")


class Settings(BaseModel):
    """The settings in the TOML file of ``--data``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    examples: bool = False
    """Whether three solved requests come before the question: for a model that was never taught to call functions. In
    each request, also in the question, the functions and their arguments stand before the text."""

    train: tuple[Literal["simple", "multiple", "parallel"], ...] = Field(default=("simple", "multiple", "parallel"))
    """The categories of the training questions."""


def _request(text: str, tools: Sequence[ToolSpec]) -> Message:
    described = (f"{tool.name}: {describe_parameters(tool.parameters)}" for tool in tools)
    return Message.user("\n".join((*described, "", text)))


def _tool(name: str, **types: str) -> ToolSpec:
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    return ToolSpec(name, "", {"type": "object", "properties": properties, "required": list(types)})


_ADD, _PLAY = _tool("math_add", a="integer", b="integer"), _tool("play_song", title="string", artist="string")
_WEATHER = _tool("weather_forecast", city="string", days="integer")
EXAMPLES: tuple[Message, ...] = (
    _request("What is 7 plus 5?", [_ADD]),
    tool_call("math_add", a=7, b=5),
    _request("Will it rain in Oslo in the next 3 days?", [_PLAY, _WEATHER]),
    tool_call("weather_forecast", city="Oslo", days=3),
    _request("I want to hear Yesterday by the Beatles.", [_PLAY]),
    tool_call("play_song", title="Yesterday", artist="Beatles"),
)


@dataclass(slots=True)
class FunctionsByTask:
    """The environment of questions with functions of their own."""

    settings: Settings
    tools: tuple[ToolSpec, ...] = ()

    def for_task(self, task: Task) -> CallingEnv:
        return CallingEnv(tuple(map(tool_spec, task.data["functions"])), self.settings.examples)

    async def open(self, task: Task, context: RolloutContext) -> CallingEpisode:
        return await self.for_task(task).open(task, context)


@dataclass(slots=True)
class CallingEnv:
    """The environment of one question. The episode ends with the first action."""

    tools: tuple[ToolSpec, ...]
    examples: bool

    async def open(self, task: Task, context: RolloutContext) -> CallingEpisode:
        system, question = task.messages
        solved = (system, *EXAMPLES, _request(question.text, self.tools))
        return CallingEpisode(solved if self.examples else task.messages, tuple(tool.name for tool in self.tools))


@dataclass(slots=True)
class CallingEpisode:
    start: tuple[Message, ...]
    names: tuple[str, ...]

    async def step(self, action: Action) -> Transition:
        return Transition((), end="terminal", results=tuple(map(self._result, action.message.calls)))

    async def close(self) -> None:
        """Do nothing, because the episode holds no resources."""

    def _result(self, call: ToolCall) -> ToolResult:
        # Nobody reads the text, but the rewards and the health checks count invalid calls by their results.
        if call.error is not None or call.arguments is None:
            return malformed_call_result(call.error or "it has no arguments")
        return ToolResult((), ok=True) if call.name in self.names else unknown_tool_result(call.name, self.names)


def build(seed: int, data: Path | None = None) -> TaskSet:
    """Build the task set. ``data`` is None or a TOML file of settings. Raise InvalidInput without the package."""
    load_checker()
    settings = Settings() if data is None else read_settings_file(Settings, data)
    return TaskSet(
        name="bfcl",
        env=FunctionsByTask(settings),
        tasks=lambda split: tasks(split, settings.train),
        scorers=(FunctionScorer({"correct": correct}),),
        rewards=("correct", "function"),
        recipe={"reward_weights.function": 0.0, "group_size": 8, "groups_per_step": 8, "max_tokens": 128},
        evaluation=tuple(CATEGORIES),
        kind=lambda task: list(CATEGORIES).index(task.data["category"]),
        solutions=solutions,
    )


@cache
def tasks(split: str, train: tuple[str, ...] = tuple(CATEGORIES)) -> tuple[Task, ...]:
    """Return the held-out questions of a category, or the other questions of the categories ``train`` as "train".

    A question whose text is also held out, perhaps in another category, is not trained.
    """
    if split != "train" and split not in CATEGORIES:
        raise InvalidInput("split of bfcl", got=split, do=f"give one of train, {', '.join(CATEGORIES)}")
    rows = [(name, *pair) for name, category in CATEGORIES.items() for pair in questions(category)]
    ids = {name: [row["id"] for known, row, _ in rows if known == name] for name in CATEGORIES}
    tested = frozenset().union(*(held_out(each, HELD_OUT) for each in ids.values()))
    texts = {row["question"][0][0]["content"] for _, row, _ in rows if row["id"] in tested}
    return tuple(
        _task(name, row, truth, split)
        for name, row, truth in rows
        if (row["id"] in tested and name == split)
        or (split == "train" and name in train and row["question"][0][0]["content"] not in texts)
    )


def _task(category: str, row: Mapping[str, Any], truth: Sequence[Any], split: str) -> Task:
    data = {"category": category, "functions": row["function"], "truth": truth}
    return Task(row["id"], (SYSTEM, *row["question"][0]), data, split)


def correct(trajectory: Trajectory, task: Task) -> Mapping[str, float]:
    """Return two rewards by name, each 1.0 or 0.0.

    - ``correct``: 1.0 if the package's checker accepts the calls.
    - ``function``: 1.0 if the calls can be read, and call the right functions as often as needed.
    """
    calls = [call for turn in trajectory.env_turns for call in turn.action.message.calls]
    data = task.data
    expected = Counter(tool_name(name) for each in data["truth"] for name in each)
    function = Counter(call.name for call in calls) == expected and all(call.arguments is not None for call in calls)
    written = [{call.name: dict(call.arguments or {})} for call in calls]
    category = CATEGORIES[data["category"]]
    right = function and calls_are_correct(category, data["functions"], written, data["truth"])
    return {"correct": float(right), "function": float(function)}


def solutions(task: Task) -> ReferenceSolutions:
    required = {each["name"]: each["parameters"]["required"] for each in task.data["functions"]}
    possible = [(name, values) for each in task.data["truth"] for name, values in each.items()]
    gold = [(tool_name(name), _first_values(values, required[name])) for name, values in possible]
    (name, arguments), *rest = gold
    unknown = {**arguments, "no_such_argument": 1}
    wrong = {
        "one call too many": [*gold, gold[0]],
        "another function": [("no_such_function", arguments), *rest],
        "another argument": [(name, unknown), *rest],
        "other values": [(name, dict.fromkeys(arguments, "no such value")), *rest] if arguments else [],
        "one call too few": rest,
    }
    return ReferenceSolutions(
        gold=(reference("the first possible answers", several_calls(gold)),),
        wrong=(
            reference("a text", Message.assistant("I call the function.")),
            *(reference(what, several_calls(calls)) for what, calls in wrong.items()),
        ),
        expected_rewards={"correct": 1.0},
    )


def _first_values(possible: Mapping[str, Sequence[Any]], required: Collection[str] = ()) -> dict[str, Any]:
    # The possible answers list the values of each argument. "" among them: the argument may be left out, though the
    # checker still demands it if the function does.
    return {
        name: next(_value(value) for value in values if value != "")
        for name, values in possible.items()
        if "" not in values or name in required
    }


def _value(possible: Any) -> Any:
    if isinstance(possible, dict):
        return _first_values(possible)
    return [_value(each) for each in possible] if isinstance(possible, list) else possible
