"""TinyWiki: a generated encyclopedia, and questions that need one, two or three pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from agent_r1.core.messages import Text
from agent_r1.core.task import Task
from agent_r1.core.taskset import ReferenceSolutions, TaskSet, tool_call
from agent_r1.envs.tool_env import NaiveRag, ToolEnv
from agent_r1.rewards.scoring import FunctionScorer, exact_match, f1
from agent_r1.tasksets.answers import answer_solutions
from agent_r1.tasksets.tinywiki.model import TINY_BASE_RECIPE
from agent_r1.tasksets.tinywiki.questions import tasks
from agent_r1.tasksets.tinywiki.wiki import Chain, found_page, search

MAX_TURNS = 5

RECIPE: Mapping[str, Any] = {
    **TINY_BASE_RECIPE,
    "reward_weights.f1": 0.0,
    "reward_weights.found": 0.0,
    "steps": 36,
    "trainer.learning_rate": 1e-3,
    "evaluate_every": 12,
    "pass_k": 16,
}
"""The default settings for training on this task set. Only the reward ``em`` has a weight other than 0."""

FIND = replace(search, spec=replace(search.spec, name="find"))
"""The search tool with the name "find", for the split ``renamed-tool``."""


def build(seed: int) -> TaskSet:
    """Build the task set. ``seed`` determines the training tasks."""
    env, renamed = (ToolEnv(tools=[one], max_turns=MAX_TURNS, call_rewards=found_page) for one in (search, FIND))
    return TaskSet(
        name="tinywiki",
        env=env,
        tasks=partial(tasks, seed=seed),
        scorers=(FunctionScorer({"em": exact_match, "f1": f1}),),
        baselines={"naive-rag": NaiveRag(search)},
        rewards=("em", "f1", "found"),
        recipe=RECIPE,
        evaluation=("style-a", "style-b", "three-hop"),
        validation="validation",
        # Training has no questions of three hops, so that their mean must not hide what was learned.
        subset=lambda task: "three-hop" if len(task.data["chain"].relations) == 3 else "style-a and style-b",
        solutions=solutions,
        variants={"paraphrased": env, "renamed-tool": renamed, "unseen-relation": env},
    )


def solutions(task: Task) -> ReferenceSolutions:
    chain: Chain = task.data["chain"]
    tool = FIND if task.split == "renamed-tool" else search
    # what tiny-base writes, too: the fact that was read, and then the next call or the answer
    thoughts = [f"{relation} {value}." for relation, value in zip(chain.relations, chain.values, strict=True)]
    calls = [tool_call(tool.spec.name, query=title) for title in chain.pages]
    before = ["", *thoughts[:-1]]
    searches = tuple(replace(call, parts=(Text(said),)) for said, call in zip(before, calls, strict=True))
    full = {"em": 1.0, "f1": 1.0}
    return answer_solutions(task, searches, chain.pages[-1], MAX_TURNS, full, thought=f"{thoughts[-1]}\n")
