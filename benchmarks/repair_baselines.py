"""What programs without a model reach on ``code-repair``: the simplest policies with the agent's own tool.

    python benchmarks/repair_baselines.py --data recipes/code_repair_data.toml
    python benchmarks/repair_baselines.py --data mbpp.jsonl --split validation

A policy that draws at random is given the list of the edits that it draws from: the proposed lines, or all mutations of
the function with the bug. ``one random edit`` answers one of them. ``random edits until one passes`` tries other edits
until the visible test passes or one turn is left, and answers the last edit that passed, or else one not tried.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import Responder, TaskSet, tool_call
from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
from agent_r1.rollout.scripted_agent import NullRecorder, ScriptedAgent, no_gate
from agent_r1.tasksets import build
from agent_r1.tasksets.answers import answer
from agent_r1.training.tables import wilson_interval
from environments.code_repair import bug_of, read_settings
from environments.code_repair.bugs import Bug, mutations

Policy = Callable[[Bug, random.Random, int], Responder]
"""A function (bug, random numbers, largest number of actions) -> responder."""


def possible_edits(bug: Bug) -> list[str]:
    """Return the edits that a program can draw from: numbers of proposals, or the lines of all mutations."""
    if bug.proposals:
        return [str(number) for number in range(1, len(bug.proposals) + 1)]
    return [one.source.splitlines()[one.line].strip() for one in mutations(bug.source)]


def unchanged(bug: Bug, rng: random.Random, turns: int) -> Responder:
    return lambda conversation, turn: answer(bug.source.splitlines()[bug.line].strip())


def one_random_edit(bug: Bug, rng: random.Random, turns: int) -> Responder:
    edit = rng.choice(possible_edits(bug))
    return lambda conversation, turn: answer(edit)


def until_one_passes(bug: Bug, rng: random.Random, turns: int) -> Responder:
    edits = possible_edits(bug)
    rng.shuffle(edits)

    def respond(conversation: tuple[Message, ...], turn: int) -> Message:
        passed = turn > 0 and conversation[-1].text.startswith("1 of 1")
        if passed or turn >= turns - 1:
            return answer(edits[turn - 1] if passed else edits[min(turn, len(edits) - 1)])
        return tool_call("try", edit=edits[min(turn, len(edits) - 1)])

    return respond


POLICIES: dict[str, Policy] = {
    "the function unchanged": unchanged,
    "one random edit": one_random_edit,
    "random edits until one passes": until_one_passes,
}


async def fix_rate(taskset: TaskSet, split: str, turns: int, policy: Policy, repeats: int) -> list[float]:
    """Return the share of the repairs of each task, over ``repeats`` attempts with other random numbers."""
    tasks: Sequence[Task] = [task for task in taskset.tasks(split) for _ in range(repeats)]
    agent = ScriptedAgent(
        taskset.env, lambda a: policy(bug_of(tasks[a.group_id]), random.Random(f"{a.group_id}"), turns)
    )
    collector = Collector(agent, taskset.scorers, NullRecorder(), "baseline", RolloutLimits(retries=0))
    found = [0.0] * len(tasks)
    async with aclosing(collector.collect((GroupRequest(i, t, 1) for i, t in enumerate(tasks)), no_gate)) as groups:
        async for group in groups:
            found[group.group_id] = float(group.trajectories[0].rewards["fixed"] or 0.0)
    return [sum(found[start : start + repeats]) / repeats for start in range(0, len(found), repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="functions, or settings as a TOML file")
    parser.add_argument("--split", default="test")
    parser.add_argument("--repeats", type=int, default=5, help="attempts per task and policy")
    arguments = parser.parse_args()
    taskset, turns = build("code-repair", arguments.data, None, 0), read_settings(arguments.data).turns
    table = Table("policy", "fix rate", "95 % interval", "tasks")
    for name, policy in POLICIES.items():
        shares = asyncio.run(fix_rate(taskset, arguments.split, turns, policy, arguments.repeats))
        mean = sum(shares) / len(shares)
        low, high = wilson_interval(mean, len(shares))
        table.add_row(name, f"{mean:.3f}", f"{low:.2f}-{high:.2f}", str(len(shares)))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
