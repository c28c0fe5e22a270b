"""``people``: questions in plain English about invented people. The agent searches the pages of the people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match, f1
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.generated import refuse_files
from agent_r1.tasksets.people.examples import EXAMPLES, INSTRUCTION, READING, READING_EXAMPLES
from agent_r1.tasksets.people.questions import tasks
from agent_r1.tasksets.people.search import pages_read, retrieval_tool, search_tool, supported
from agent_r1.tasksets.people.settings import read_settings

RECIPE: Mapping[str, Any] = {
    "tool_format": "tags",
    "group_size": 8,
    "groups_per_step": 8,
    "max_tokens": 32,
    "context": 2048,
    "reward_weights.f1": 0.0,
    "reward_weights.pages_read": 0.0,
    "reward_weights.supported": 0.0,
}
"""The default settings for training on this task set. Only the reward ``em`` has a weight other than 0."""

OTHER_NAME = "look_up"
"""The name of the search tool in the split ``renamed-tool``."""


def build(data: Path | None, corpus: str | Path | None, seed: int) -> TaskSet:
    """Build the task set. ``data`` is None or a TOML file of settings.

    Raises InvalidInput if ``corpus`` is given, or if ``data`` cannot be used.
    """
    refuse_files("people", None, corpus)
    settings = read_settings(data)

    def agent_env(name: str) -> ToolEnv:
        search = search_tool(settings.pages, name)
        return ToolEnv(tools=[search], max_turns=settings.turns, system=INSTRUCTION, examples=_with_tool(name))

    return TaskSet(
        name="people",
        env=agent_env("search"),
        tasks=lru_cache(lambda split: tasks(split, seed, settings.hops)),
        scorers=(FunctionScorer({"em": exact_match, "f1": f1, "pages_read": pages_read, "supported": supported}),),
        baselines={"naive-rag": NaiveRag(retrieval_tool(settings.pages), system=READING, examples=READING_EXAMPLES)},
        recipe=RECIPE,
        evaluation=("1-hop", "2-hop", "3-hop"),
        validation="validation",
        kind=lambda task: len(task.data["chain"].relations),
        solutions=partial(solutions, max_turns=settings.turns),
        variants={"renamed-tool": agent_env(OTHER_NAME)},
    )


def _with_tool(name: str) -> tuple[Message, ...]:
    return tuple(
        replace(message, calls=tuple(replace(call, name=name) for call in message.calls)) for message in EXAMPLES
    )


def solutions(task: Task, max_turns: int) -> ReferenceSolutions:
    chain = task.data["chain"]
    name = OTHER_NAME if task.split == "renamed-tool" else "search"
    searches = tuple(tool_call(name, query=title) for title in chain.pages)
    return answer_solutions(task, searches, chain.pages[-1], max_turns, {"em": 1.0, "f1": 1.0})
