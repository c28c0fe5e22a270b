"""Multi-turn questions of the Berkeley function calling leaderboard, with the simulated APIs of ``bfcl-eval``.

A user makes several requests. The agent calls functions of simulated APIs, and ends each request with a message without
calls. The package's checker runs the calls again, and compares states and results with those of its ground truth.
"""

from __future__ import annotations

import ast
import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

from agent_r1.core.arguments import describe_parameters
from agent_r1.core.environment import Episode, RolloutContext
from agent_r1.core.errors import InvalidInput
from agent_r1.core.messages import Message, ToolCall, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet
from agent_r1.core.threads import run_in_thread
from agent_r1.core.trajectory import Trajectory
from agent_r1.envs.user_env import Reply, UserEnv
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.tasksets.answers import reference
from agent_r1.tools.function_tool import InvalidArguments, Resources, Tool
from environments.bfcl.package import held_out, questions, read_lines, require_package, several_calls, tool_spec

CATEGORIES: Mapping[str, str] = {"base": "multi_turn_base", "missing-value": "multi_turn_miss_param"}
"""The categories of the package by split. In the second, a value that the agent must ask for is missing."""

HELD_OUT = 40
MAX_ACTIONS = 10
"""The number of actions per request, on average over the requests of a task."""

_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval"
_FILES = "bfcl_eval.constants.executable_backend_config"


def build(seed: int, data: Path | None = None) -> TaskSet:
    """Build the task set. Raise InvalidInput if the package is not installed, or if ``data`` is given."""
    require_package()
    if data is not None:
        raise InvalidInput("data", got=data, do="leave it out")
    return TaskSet(
        name="bfcl-multi-turn",
        env=ApisByTask(),
        tasks=tasks,
        scorers=(FunctionScorer({"correct": correct}, timeout=60.0),),
        rewards=("correct",),
        evaluation=tuple(CATEGORIES),
        solutions=solutions,
    )


@cache
def tasks(split: str) -> tuple[Task, ...]:
    """Return the held-out tasks of a category, or all others as "train". Tasks of equal number are much alike."""
    if split != "train" and split not in CATEGORIES:
        raise InvalidInput("split of bfcl", got=split, do=f"give one of train, {', '.join(CATEGORIES)}")
    rows = [(name, row, truth) for name, category in CATEGORIES.items() for row, truth in questions(category)]
    tested = held_out(sorted({_number(row) for _, row, _ in rows}), HELD_OUT)
    chosen = (each for each in rows if (_number(each[1]) in tested) == (split != "train"))
    return tuple(_task(row, truth, split) for name, row, truth in chosen if split in ("train", name))


def _number(row: Mapping[str, Any]) -> str:
    return str(row["id"]).rpartition("_")[2]


def _task(row: Mapping[str, Any], truth: Sequence[Sequence[str]], split: str) -> Task:
    return Task(row["id"], row["question"][0], {"entry": row, "truth": truth}, split)


class ApisByTask:
    """The environment of tasks with simulated APIs of their own."""

    tools: tuple[ToolSpec, ...] = ()

    def for_task(self, task: Task) -> UserEnv:
        entry = task.data["entry"]
        specs = _functions(tuple(entry["involved_classes"])).values()
        return UserEnv([_tool(spec) for spec in specs], Requests(), max_turns=MAX_ACTIONS * len(entry["question"]))

    async def open(self, task: Task, context: RolloutContext) -> Episode:
        return await self.for_task(task).open(task, context)


class Requests:
    """A user who makes the next request of the task when the agent writes a message without calls."""

    async def reply(self, task: Task, said: Sequence[Message], context: RolloutContext) -> Reply:
        requests = task.data["entry"]["question"]
        made = sum(message.role == "user" for message in said)
        return Reply(requests[made][0]["content"]) if made < len(requests) else Reply("", end=True)


@cache
def _functions(apis: tuple[str, ...]) -> dict[str, ToolSpec]:
    files = import_module(_FILES).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    specs = [tool_spec(row) for api in apis for row in read_lines(f"multi_turn_func_doc/{files[api]}")]
    return {spec.name: spec for spec in specs}


@dataclass(slots=True)
class Simulation:
    """The state of the simulated APIs in one episode."""

    entry: Mapping[str, Any]
    name: str = field(default_factory=lambda: f"attempt{uuid4().hex}")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, call: str) -> str:
        async with self.lock:  # calls of one action change the state in their order
            return await run_in_thread(self._run, call)

    def _run(self, call: str) -> str:
        execute = _module("multi_turn_utils").execute_multi_turn_func_call
        entry = self.entry
        results, _ = execute([call], entry["initial_config"], entry["involved_classes"], self.name, entry["id"])
        return str(results[0])

    async def close(self) -> None:
        forget(self.name)


def forget(name: str) -> None:
    """Remove the states that the package keeps for ``name`` in a module's global names."""
    state = vars(_module("multi_turn_utils"))
    # list() first: threads of other episodes add names meanwhile.
    for key in [key for key in list(state) if key.startswith(f"{name}_")]:
        del state[key]


def _module(name: str) -> ModuleType:
    return import_module(f"{_CHECKER}.{name}")


class OpenSimulation:
    async def open(self, task: Task, context: RolloutContext) -> Simulation:
        return Simulation(task.data["entry"])


_SIMULATIONS = OpenSimulation()


def _tool(spec: ToolSpec) -> Tool:
    async def function(arguments: Mapping[str, Any], resources: Resources) -> str:
        return await (await resources.get(_SIMULATIONS)).run(_written(spec.name, arguments))

    return Tool(spec, function, partial(_bind, spec))


def _bind(
    spec: ToolSpec, arguments: Mapping[str, Any], task: Task, context: RolloutContext, resources: Resources
) -> dict[str, Any] | InvalidArguments:
    # The package evaluates the text of a call: a name must be one of the function's, and a value a literal of Python.
    if reason := _problem(spec, arguments):
        return InvalidArguments(f"{reason}. Expected: {describe_parameters(spec.parameters)}")
    return {"arguments": arguments, "resources": resources}


def _problem(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    known, required = spec.parameters["properties"], spec.parameters.get("required", ())
    unknown, missing = [*arguments.keys() - known.keys()], [*set(required) - arguments.keys()]
    if unknown or missing:
        return f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
    return "" if _is_literal(list(arguments.values())) else "a value that is no JSON"


def _is_literal(value: object) -> bool:
    if isinstance(value, list | dict):
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return all(map(_is_literal, items))
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def correct(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 if the package's checker accepts the calls of all requests, otherwise 0.0."""
    entry, truth = task.data["entry"], task.data["truth"]
    functions = _functions(tuple(entry["involved_classes"]))
    requests: list[list[list[str]]] = [[]]
    for turn in trajectory.env_turns:
        calls = turn.action.message.calls
        run = [_written(call.name, call.arguments or {}) for call in calls if _was_run(functions, call)]
        requests[-1] += [run] if run else []
        requests += [] if calls else [[]]
    if len(requests) != len(truth) + 1:
        return 0.0  # the attempt ended before the last request was done
    name = f"attempt{uuid4().hex}"
    try:
        verdict = _module("multi_turn_checker").multi_turn_checker(requests, truth, entry, "", name)
    finally:
        forget(f"{name}_eval")
        forget(f"{name}_ground_truth_eval")
    return float(verdict["valid"])


def _was_run(functions: Mapping[str, ToolSpec], call: ToolCall) -> bool:
    return call.arguments is not None and call.name in functions and not _problem(functions[call.name], call.arguments)


def solutions(task: Task) -> ReferenceSolutions:
    functions = _functions(tuple(task.data["entry"]["involved_classes"]))
    requests = [[_parsed(functions, text) for text in texts] for texts in task.data["truth"]]
    last = max(index for index, calls in enumerate(requests) if calls)
    undone = [[] if index == last else calls for index, calls in enumerate(requests)]
    return ReferenceSolutions(
        gold=(reference("the ground truth", *_messages(requests)),),
        wrong=(
            reference("no calls", *_messages([[] for _ in requests])),
            reference("a request is not done", *_messages(undone)),
            reference("it ends early", *_messages(requests)[:1] * MAX_ACTIONS * len(requests)),
        ),
        expected_rewards={"correct": 1.0},
    )


def _parsed(functions: Mapping[str, ToolSpec], text: str) -> tuple[str, Mapping[str, Any]]:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    name = call.func.id
    positional = dict(zip(functions[name].parameters["properties"], map(ast.literal_eval, call.args), strict=False))
    return name, positional | {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def _messages(requests: Sequence[Sequence[tuple[str, Mapping[str, Any]]]]) -> list[Message]:
    done = Message.assistant("Done.")
    return [message for calls in requests for message in ([several_calls(calls), done] if calls else [done])]
