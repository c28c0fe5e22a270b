"""Evaluation: what each method answers on the splits of a world, and how often one of k tries succeeds."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agent_r1.core.environment import Env
from agent_r1.core.errors import InvalidInput
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Group, Scorer, Trajectory
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import Collector, Limits, Order
from agent_r1.store import is_run, run_folder
from agent_r1.store.reader import RunReader
from agent_r1.training.build import Policy, check_world, limits_of, open_policy, with_columns
from agent_r1.training.checkpoint.files import trained_model
from agent_r1.training.config import EvalConfig
from agent_r1.training.eval_metrics import Answered, answered, pass_at_k
from agent_r1.training.null_recorder import Unrecorded, at_once
from agent_r1.training.report import Cell, PassAtK, Progress, Table, cell_of

BASE = "base-tool-call"
TRAINED = "trained"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: who acts, in which environment."""

    name: str
    agent: Agent
    env: Env


async def attempts(
    method: Method, scorers: tuple[Scorer, ...], tasks: Iterable[Task], size: int, limits: Limits
) -> list[Group]:
    """``size`` scored attempts at each task."""
    collector = Collector(method.agent, method.env, scorers, Unrecorded(), f"evaluation of {method.name}", limits)
    orders = (Order(serial, task, size) for serial, task in enumerate(tasks))
    async with aclosing(collector.collect(orders, at_once)) as groups:
        return [group async for group in groups]


def greedy(agent: Agent) -> Agent:
    """The same policy, always taking its most probable token."""
    return replace(agent, sampling=replace(agent.sampling, temperature=0.0))


def lived_in(method: Method, world: TaskSet, split: str) -> Env:
    """Where a method meets a split: an agent in the environment that the world has for it, a baseline in its own."""
    return world.env_for_split(split) if method.env is world.env else method.env


def sampled(agent: Agent) -> Agent:
    """The same policy, drawing from its whole distribution."""
    return replace(agent, sampling=replace(agent.sampling, temperature=1.0))


async def greedy_attempts(method: Method, world: TaskSet, split: str, count: int, limits: Limits) -> list[Trajectory]:
    """One greedy attempt at each of the first ``count`` tasks of a split."""
    method = replace(method, agent=greedy(method.agent), env=lived_in(method, world, split))
    groups = await attempts(method, world.scorers, world.tasks(split)[:count], 1, limits)
    return [group.trajectories[0] for group in groups]


async def answers_of(method: Method, world: TaskSet, split: str, count: int, limits: Limits) -> list[Answered]:
    """How these were scored."""
    return [answered(trajectory) for trajectory in await greedy_attempts(method, world, split, count, limits)]


async def pass_at(
    method: Method, world: TaskSet, count: int, k: int, size: int, limits: Limits, progress: Progress
) -> PassAtK:
    """pass@1 and pass@k over the world's evaluation splits, estimated from ``size`` sampled attempts at each task."""
    progress.say(f"pass@{k} of {method.name}")
    ones, shares = {}, {}
    for split in world.evaluation:
        there = replace(method, env=lived_in(method, world, split))
        groups = await attempts(there, world.scorers, world.tasks(split)[:count], size, limits)
        right = [sum(answered(trajectory).em == 1 for trajectory in group.trajectories) for group in groups]
        ones[split] = statistics.fmean(pass_at_k(size, c, 1) for c in right)
        shares[split] = statistics.fmean(pass_at_k(size, c, k) for c in right)
    return PassAtK(k, shares, size, ones)


def methods_of(world: TaskSet, base: Agent, trained: Agent | None = None) -> list[Method]:
    """The rows that can be measured: the world's baselines and the base model with tools, then the trained agent."""
    rows = [Method(name, base, env) for name, env in world.baselines.items()]
    rows.append(Method(BASE, base, world.env))
    return rows if trained is None else [*rows, Method(TRAINED, trained, world.env)]


def retrieval_of(world: TaskSet) -> dict[str, Mapping[str, float]]:
    """The retriever's measures by evaluation split, where the world can tell."""
    if world.retrieval is None:
        return {}
    measured = {split: world.retrieval(split) for split in world.evaluation}
    return {split: values for split, values in measured.items() if values}


async def table_of(methods: Sequence[Method], world: TaskSet, count: int, limits: Limits, progress: Progress) -> Table:
    """All methods over the world's evaluation splits."""
    cells: dict[str, dict[str, Cell]] = {}
    measures: dict[str, dict[str, Mapping[str, float]]] = {}
    measure = "exact match"
    for method in methods:
        progress.say(f"evaluating {method.name} on {', '.join(world.evaluation)}")
        cells[method.name], measures[method.name] = {}, {}
        for split in world.evaluation:
            lived = await greedy_attempts(method, world, split, count, limits)
            answers = [answered(trajectory) for trajectory in lived]
            cells[method.name][split] = cell_of(answers)
            measures[method.name][split] = measures_of(world, lived)
            _tell_failures(method.name, split, answers, progress)
            measure = next((answer.measure for answer in answers if not answer.exact), measure)
    return Table(cells, retrieval_of(world), measure, measures if world.measures is not None else {})


def measures_of(world: TaskSet, lived: Sequence[Trajectory]) -> Mapping[str, float]:
    """The world's own figures of scored attempts; none where it has none."""
    return {} if world.measures is None else world.measures(lived)


def _tell_failures(method: str, split: str, answers: Sequence[Answered], progress: Progress) -> None:
    """A wrong answer and an attempt that broke look alike in the table, so the second is said."""
    reasons = Counter(answer.failure for answer in answers if answer.failure is not None)
    for reason, count in reasons.most_common(1):
        progress.say(f"{method} on {split}: {reasons.total()} of {len(answers)} failed, {count} of them: {reason}")


def evaluate(config: EvalConfig, world: TaskSet, progress: Progress) -> Table:
    """The table of ``agent-r1 eval``. Where the model is a run, its base model and its trained one are compared."""
    torch.set_num_threads(config.threads)
    world = with_columns(world, config.splits)
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
    config: EvalConfig, world: TaskSet, base: Policy, trained: Policy | None, progress: Progress
) -> Table:
    policies = [base] if trained is None else [base, trained]
    engines = [TorchEngine(policy.model, policy.context) for policy in policies]
    agents = [policy.agent(engine, config, 0.0) for policy, engine in zip(policies, engines, strict=True)]
    methods = methods_of(world, agents[0], *agents[1:])
    try:
        chosen, limits = _chosen(methods, config.methods), limits_of(config)
        table = await table_of(chosen, world, config.n, limits, progress)
        return replace(table, passed=await _passed(config, world, chosen, limits, progress))
    finally:
        for engine in engines:
            await engine.close()


async def _passed(
    config: EvalConfig, world: TaskSet, methods: Sequence[Method], limits: Limits, progress: Progress
) -> Mapping[str, PassAtK]:
    if config.pass_k == 0:
        return {}
    k, size = config.pass_k, config.pass_attempts or config.pass_k
    sampling = [replace(method, agent=sampled(method.agent)) for method in methods]
    return {m.name: await pass_at(m, world, config.n, k, size, limits, progress) for m in sampling}


def _chosen(methods: Sequence[Method], names: Sequence[str]) -> list[Method]:
    there = [method.name for method in methods]
    for name in names:
        if name not in there:
            raise InvalidInput("--methods", got=repr(name), do=f"choose from {', '.join(there)}")
    return [method for method in methods if not names or method.name in names]
