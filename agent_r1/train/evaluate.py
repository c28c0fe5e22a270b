"""Evaluation: what each method answers on the splits of a world, and how often one of k tries succeeds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agent_r1.core.errors import InvalidInput
from agent_r1.core.record import Event
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Group, Scorer
from agent_r1.core.world import Env, World
from agent_r1.rollout.agent import Agent
from agent_r1.rollout.collector import Collector, Limits, Order
from agent_r1.rollout.torch_engine import TorchEngine
from agent_r1.store import is_run, run_folder
from agent_r1.store.reader import RunReader
from agent_r1.train.checkpoint import trained_model
from agent_r1.train.config import EvalConfig
from agent_r1.train.prepare import Policy, check_world, limits_of, open_policy
from agent_r1.train.report import Cell, Progress, Table, cell_of
from agent_r1.train.scores import Answered, answered

BASE = "base-tool-call"
TRAINED = "trained"


class Unrecorded:
    """A recorder for attempts that are no part of a run: evaluation."""

    async def record(self, *events: Event) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: who acts, in which environment."""

    name: str
    agent: Agent
    env: Env


async def _at_once(order: Order) -> int:
    return 0


async def attempts(
    method: Method, scorers: tuple[Scorer, ...], tasks: Iterable[Task], size: int, limits: Limits
) -> list[Group]:
    """``size`` scored attempts at each task."""
    collector = Collector(method.agent, method.env, scorers, Unrecorded(), f"evaluation of {method.name}", limits)
    orders = (Order(serial, task, size) for serial, task in enumerate(tasks))
    async with aclosing(collector.collect(orders, _at_once)) as groups:
        return [group async for group in groups]


def greedy(agent: Agent) -> Agent:
    """The same policy, always taking its most probable token."""
    return replace(agent, sampling=replace(agent.sampling, temperature=0.0))


async def answers_of(method: Method, world: World, split: str, count: int, limits: Limits) -> list[Answered]:
    """One greedy attempt at each of the first ``count`` tasks of a split."""
    method = replace(method, agent=greedy(method.agent))
    groups = await attempts(method, world.scorers, world.tasks(split)[:count], 1, limits)
    return [answered(group.trajectories[0]) for group in groups]


async def pass_at(
    method: Method, world: World, splits: Sequence[str], count: int, k: int, limits: Limits
) -> dict[str, float]:
    """The share of tasks of which at least one of k sampled attempts is right."""
    shares = {}
    for split in splits:
        groups = await attempts(method, world.scorers, world.tasks(split)[:count], k, limits)
        solved = [any(answered(t).em == 1 for t in group.trajectories) for group in groups]
        shares[split] = sum(solved) / len(solved)
    return shares


def methods_of(world: World, base: Agent, trained: Agent | None = None) -> list[Method]:
    """The rows that can be measured: the world's baselines and the base model with tools, then the trained agent."""
    rows = [Method(name, base, env) for name, env in world.baselines.items()]
    rows.append(Method(BASE, base, world.env))
    return rows if trained is None else [*rows, Method(TRAINED, trained, world.env)]


def retrieval_of(world: World) -> dict[str, Mapping[str, float]]:
    """The retriever's measures by evaluation split, where the world can tell."""
    if world.retrieval is None:
        return {}
    measured = {split: world.retrieval(split) for split in world.evaluation}
    return {split: values for split, values in measured.items() if values}


async def table_of(methods: Sequence[Method], world: World, count: int, limits: Limits, progress: Progress) -> Table:
    """All methods over the world's evaluation splits."""
    cells: dict[str, dict[str, Cell]] = {}
    measure = "exact match"
    for method in methods:
        progress.say(f"evaluating {method.name} on {', '.join(world.evaluation)}")
        cells[method.name] = {}
        for split in world.evaluation:
            answers = await answers_of(method, world, split, count, limits)
            cells[method.name][split] = cell_of(answers)
            _tell_failures(method.name, split, answers, progress)
            measure = next((answer.measure for answer in answers if not answer.exact), measure)
    return Table(cells, retrieval_of(world), measure)


def _tell_failures(method: str, split: str, answers: Sequence[Answered], progress: Progress) -> None:
    """A wrong answer and an attempt that broke look alike in the table, so the second is said."""
    reasons = Counter(answer.failure for answer in answers if answer.failure is not None)
    for reason, count in reasons.most_common(1):
        progress.say(f"{method} on {split}: {reasons.total()} of {len(answers)} failed, {count} of them: {reason}")


def evaluate(config: EvalConfig, world: World, progress: Progress) -> Table:
    """The table of ``agent-r1 eval``. Where the model is a run, its base model and its trained one are compared."""
    torch.set_num_threads(config.threads)
    run = run_folder(config.model)
    if not is_run(run):
        base = open_policy(config, world)
        check_world(base, world, world.evaluation)
        return asyncio.run(_evaluate(config, world, base, None, progress))
    base = open_policy(config.model_copy(update={"model": _base_of(run)}), world)
    trained = open_policy(config.model_copy(update={"model": str(trained_model(run))}), world)
    check_world(trained, world, world.evaluation)
    return asyncio.run(_evaluate(config, world, base, trained, progress))


def _base_of(run: Path) -> str:
    reader = RunReader(run)
    try:
        return str(reader.config()["model"])
    finally:
        reader.close()


async def _evaluate(
    config: EvalConfig, world: World, base: Policy, trained: Policy | None, progress: Progress
) -> Table:
    policies = [base] if trained is None else [base, trained]
    engines = [TorchEngine(policy.model, policy.context) for policy in policies]
    agents = [policy.agent(engine, config, 0.0) for policy, engine in zip(policies, engines, strict=True)]
    methods = methods_of(world, agents[0], *agents[1:])
    try:
        return await table_of(_chosen(methods, config.methods), world, config.n, limits_of(config), progress)
    finally:
        for engine in engines:
            await engine.close()


def _chosen(methods: Sequence[Method], names: Sequence[str]) -> list[Method]:
    there = [method.name for method in methods]
    for name in names:
        if name not in there:
            raise InvalidInput("--methods", got=repr(name), do=f"choose from {', '.join(there)}")
    return [method for method in methods if not names or method.name in names]
