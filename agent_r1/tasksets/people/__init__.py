"""``people``: questions in plain English about invented people. The agent searches the pages of the people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_r1.core.messages import Message
from agent_r1.core.reference_solution import ReferenceSolutions, tool_call
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs import NaiveRag, ToolEnv
from agent_r1.rewards import FunctionScorer, exact_match, f1
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.generated import refuse_files
from agent_r1.tasksets.people.examples import EXAMPLES, INSTRUCTION, READING, READING_EXAMPLES
from agent_r1.tasksets.people.questions import tasks
from agent_r1.tasksets.people.search import pages_read, search

MAX_TURNS = 7

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "group_size": 8,
    "groups_per_step": 8,
    "max_tokens": 32,
    "context": 2048,
    "reward_weights.f1": 0.0,
    "reward_weights.pages_read": 0.0,
}
"""Default settings. Only exact match is rewarded; F1 and ``pages_read`` are measured, but have weight 0."""

LOOK_UP = replace(search, spec=replace(search.spec, name="look_up"))
"""The search tool under another name, for the split ``renamed-tool``."""


def build(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    """Build the task set. ``seed`` determines the training worlds.

    Raises InvalidInput if ``data`` or ``corpus`` is given.
    """
    refuse_files("people", data, corpus)
    env = ToolEnv(tools=[search], max_turns=MAX_TURNS, system=INSTRUCTION, examples=EXAMPLES)
    renamed = ToolEnv(tools=[LOOK_UP], max_turns=MAX_TURNS, system=INSTRUCTION, examples=_with_tool(LOOK_UP.spec.name))
    return TaskSet(
        name="people",
        env=env,
        tasks=lru_cache(lambda split: tasks(split, seed)),
        scorers=(FunctionScorer({"em": exact_match, "f1": f1, "pages_read": pages_read}),),
        baselines={"naive-rag": NaiveRag(search, system=READING, examples=READING_EXAMPLES)},
        recipe=RECIPE,
        evaluation=("1-hop", "2-hop", "3-hop"),
        validation="validation",
        solutions=solutions,
        variants={"renamed-tool": renamed},
    )


def _with_tool(name: str) -> tuple[Message, ...]:
    """Return the example messages with ``name`` as the tool of every call."""
    return tuple(
        replace(message, calls=tuple(replace(call, name=name) for call in message.calls)) for message in EXAMPLES
    )


def solutions(task: Task) -> ReferenceSolutions:
    """Return the reference solutions of a task.

    The right solutions give the answer, with or without a search for each page of the chain. A wrong solution, for
    example, answers with the last person of the chain.
    """
    chain = task.data["chain"]
    name = "look_up" if task.split == "renamed-tool" else "search"
    searches = tuple(tool_call(name, query=title) for title in chain.pages)
    return answer_solutions(task, searches, chain.pages[-1], MAX_TURNS, {"em": 1.0, "f1": 1.0})
