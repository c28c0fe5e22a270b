"""Evaluation of methods: baselines, the base model and the trained model."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace

import torch

from agent_r1.core.environment import Env
from agent_r1.core.errors import AgentR1Error, InvalidInput
from agent_r1.core.inference import InferenceEngine, ValueFunction
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Group, Scorer, Trajectory
from agent_r1.gateway.agent_program import AgentProgramEnv
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.guidance import ValueGuidedEngine
from agent_r1.rewards.scoring import final_answer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.beam import BeamSearch, TurnBeam
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.session import Rollout
from agent_r1.store.reader import RunReader
from agent_r1.store.saved_weights import find_folder, named_run
from agent_r1.training.build import Placement, resolve_placement, rollout_limits
from agent_r1.training.config import EvalConfig
from agent_r1.training.environments import close_environments, make_rollout, with_environments
from agent_r1.training.metrics import EXACT_MATCH, EvalResult, majority_score, mean_logprob, pass_at_k, score_trajectory
from agent_r1.training.policy import Policy, load_policy, open_critic
from agent_r1.training.preflight import check_taskset
from agent_r1.training.progress import Progress, format_duration
from agent_r1.training.tables import Cell, PassAtK, SampledCell, Table, make_cell, normal_interval

BASE = "base-tool-call"
TRAINED = "trained"
VALUE_GUIDED = "value-guided"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the result table: ``agent`` makes attempts in ``env``, perhaps by a beam search over actions."""

    name: str
    agent: Agent
    env: Env
    search: BeamSearch | None = None

    def rollout(self) -> Rollout:
        """Return the rollout that makes the attempts. Raise InvalidInput for a beam search with an agent program."""
        if self.search is None:
            return make_rollout(self.agent, self.env)
        if isinstance(self.env, AgentProgramEnv):
            do = "give step: the conversations of an agent program cannot be repeated"
            raise InvalidInput("decode.method", got="beam with an agent program", do=do)
        return TurnBeam(self.agent, self.env, self.search)


async def attempts(
    method: Method,
    scorers: tuple[Scorer, ...],
    tasks: Sequence[Task],
    size: int,
    limits: RolloutLimits,
    progress: Progress | None = None,
) -> list[Group]:
    collector = Collector(
        method.rollout(), scorers, NullRecorder(), f"evaluation of {method.name}", limits, seed=method.agent.seed
    )
    requests = (GroupRequest(number, task, size) for number, task in enumerate(tasks))
    finished: list[Group] = []
    async with aclosing(collector.collect(requests)) as groups:
        async for group in groups:
            finished.append(group)
            if progress is not None:
                progress.on_attempts(len(finished) * size, len(tasks) * size)
    return finished


def with_temperature(agent: Agent, temperature: float) -> Agent:
    """Return a copy of the agent that samples at ``temperature``; 0: greedy decoding."""
    return replace(agent, params=replace(agent.params, temperature=temperature))


def env_for_method(method: Method, taskset: TaskSet, split: str) -> Env:
    """Return the environment of ``method`` for the tasks of ``split``."""
    return taskset.env_for_split(split) if method.env is taskset.env else method.env


async def greedy_attempts(
    method: Method, taskset: TaskSet, split: str, count: int, limits: RolloutLimits, progress: Progress | None = None
) -> list[Trajectory]:
    """Return one greedy attempt at each of the first ``count`` tasks of a split, in the order of the tasks."""
    method = replace(method, agent=with_temperature(method.agent, 0.0), env=env_for_method(method, taskset, split))
    groups = await attempts(method, taskset.scorers, taskset.tasks(split)[:count], 1, limits, progress)
    return [group.trajectories[0] for group in groups]


async def evaluate_split(
    method: Method, taskset: TaskSet, split: str, count: int, limits: RolloutLimits
) -> list[EvalResult]:
    """Return the scores of one greedy attempt at each of the first ``count`` tasks of a split."""
    return [score_trajectory(trajectory) for trajectory in await greedy_attempts(method, taskset, split, count, limits)]


async def measure_pass_at_k(
    method: Method, taskset: TaskSet, count: int, k: int, size: int, limits: RolloutLimits, progress: Progress
) -> PassAtK:
    """Return pass@k of ``size`` sampled attempts at each of the first ``count`` tasks of each evaluation split.

    A split in which every attempt failed is left out.
    """
    progress.print_line(f"pass@{k} of {method.name}")
    cells = {}
    for split in taskset.evaluation:
        in_split = replace(method, env=env_for_method(method, taskset, split))
        groups = await attempts(in_split, taskset.scorers, taskset.tasks(split)[:count], size, limits, progress)
        if (cell := sampled_cell([group.trajectories for group in groups], k)) is not None:
            cells[split] = cell
        sampled = [score_trajectory(attempt) for group in groups for attempt in group.trajectories]
        _report_failures(method.name, f"{split}, sampled", sampled, progress)
    return PassAtK(k, size, cells)


def sampled_cell(questions: Sequence[Sequence[Trajectory]], k: int) -> SampledCell | None:
    """Return the mean scores of questions, each with at least ``k`` sampled attempts that did not fail; or None."""
    scored = [[one for one in attempts if score_trajectory(one).failure is None] for attempts in questions]
    questions = [attempts for attempts in scored if len(attempts) >= k]
    if not questions:
        return None
    em = [[score_trajectory(attempt).em for attempt in attempts] for attempts in questions]
    ones = [statistics.fmean(scores) for scores in em]
    answers = [[final_answer(attempt) for attempt in attempts] for attempts in questions]
    votes = [majority_score(*question) for question in zip(answers, em, strict=True)]
    logprobs = [[mean_logprob(attempt) for attempt in attempts] for attempts in questions]
    return SampledCell(
        statistics.fmean(ones),
        *normal_interval(ones),
        any=statistics.fmean(pass_at_k(len(scores), scores.count(1.0), k) for scores in em),
        majority=statistics.fmean(votes) if any(any(given) for given in answers) else None,
        likeliest=statistics.fmean(max(zip(*question, strict=True))[1] for question in zip(logprobs, em, strict=True)),
    )


def list_methods(taskset: TaskSet, base: Agent, trained: Agent | None = None) -> list[Method]:
    """Return the methods to evaluate: the baselines, the base model with tools, and (if given) the trained agent."""
    rows = [Method(name, base, env) for name, env in taskset.baselines.items()]
    rows.append(Method(BASE, base, taskset.env))
    return rows if trained is None else [*rows, Method(TRAINED, trained, taskset.env)]


def guided_method(agent: Agent, env: Env, values: ValueFunction, decode: DecodeConfig) -> Method:
    """Return a method in which ``agent`` acts in ``env``, and ``values`` guide the choice of actions."""
    if decode.method == "beam":
        search = BeamSearch(values, decode.beams, decode.candidates, decode.temperature)
        return Method(VALUE_GUIDED, agent, env, search)
    return Method(VALUE_GUIDED, replace(agent, engine=ValueGuidedEngine(agent.engine, values, decode)), env)


def measure_retrieval(taskset: TaskSet) -> dict[str, Mapping[str, float]]:
    """Return the measures of the task set's retriever, such as its recall, for each evaluation split that has any."""
    if taskset.retrieval is None:
        return {}
    measured = {split: taskset.retrieval(split) for split in taskset.evaluation}
    return {split: values for split, values in measured.items() if values}


async def make_table(
    methods: Sequence[Method], taskset: TaskSet, count: int, limits: RolloutLimits, progress: Progress
) -> Table:
    """Return the table of one greedy attempt per method at each of the first ``count`` tasks of each split.

    Raise AgentR1Error with the most frequent reason if every attempt failed.
    """
    cells: dict[str, dict[str, Cell | None]] = {}
    measures: dict[str, dict[str, Mapping[str, float]]] = {}
    measure, began = EXACT_MATCH, time.monotonic()
    failures: Counter[str] = Counter()
    progress.print_line(f"evaluating {', '.join(method.name for method in methods)} on {', '.join(taskset.evaluation)}")
    for done, method in enumerate(methods, 1):
        cells[method.name], measures[method.name] = {}, {}
        for split in taskset.evaluation:
            trajectories = await greedy_attempts(method, taskset, split, count, limits, progress)
            results = [score_trajectory(trajectory) for trajectory in trajectories]
            cells[method.name][split] = make_cell(results)
            measures[method.name][split] = extra_measures(taskset, trajectories)
            _report_failures(method.name, split, results, progress)
            failures.update(result.failure for result in results if result.failure is not None)
            measure = next((result.measure for result in results if not result.exact), measure)
        left = (time.monotonic() - began) / done * (len(methods) - done)
        row = ", ".join(
            f"{split} {'all failed' if cell is None else f'{cell.em:z.2f}'}"
            for split, cell in cells[method.name].items()
        )
        progress.print_line(f"{method.name}: {row}" + (f"  {format_duration(left)} left" if left else ""))
    if failures and all(cell is None for row in cells.values() for cell in row.values()):
        reason, times = failures.most_common(1)[0]
        raise AgentR1Error(
            f"every attempt of the evaluation failed, {times} of {failures.total()} for this reason: {reason}"
        )
    return Table(cells, measure_retrieval(taskset), measure, measures if taskset.measures is not None else {})


def extra_measures(taskset: TaskSet, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """Return the task set's own measures of scored attempts, such as {"fix_rate": 0.4}; {} without such measures."""
    return {} if taskset.measures is None else taskset.measures(trajectories)


def _report_failures(method: str, split: str, answers: Sequence[EvalResult], progress: Progress) -> None:
    reasons = Counter(answer.failure for answer in answers if answer.failure is not None)
    for reason, count in reasons.most_common(1):
        progress.print_line(
            f"{method} on {split}: {reasons.total()} of {len(answers)} failed, {count} of them: {reason}"
        )


def evaluate(config: EvalConfig, taskset: TaskSet, progress: Progress, placement: Placement | None = None) -> Table:
    """Evaluate the model ``config.model`` (of RUN and RUN@STEP: also the base model of the run) and the baselines."""
    placement = resolve_placement(placement, config)
    torch.set_num_threads(config.threads)
    taskset = with_environments(replace(taskset, evaluation=config.splits or taskset.evaluation), config)
    named, names = named_run(config.model), [config.model]
    if named is not None:
        with closing(RunReader(named[0])) as reader:
            names = [str(reader.config()["model"]), find_folder(config.model)]  # the base model, and the trained one
        if names[0] in config.own_code:  # the trained model has the code of its base
            config = config.model_copy(update={"own_code": (*config.own_code, *names)})
    policies = [load_policy(config.model_copy(update={"model": name}), taskset, config.engine.dtype) for name in names]
    check_taskset(policies[-1], taskset, taskset.evaluation)
    engines = [placement.engine(policy, config) for policy in policies]
    return asyncio.run(_evaluate(config, taskset, policies, engines, progress))


async def _evaluate(
    config: EvalConfig,
    taskset: TaskSet,
    policies: Sequence[Policy],
    engines: Sequence[InferenceEngine],
    progress: Progress,
) -> Table:
    agents = [policy.agent(engine, config, 0.0) for policy, engine in zip(policies, engines, strict=True)]
    methods = list_methods(taskset, agents[0], *agents[1:])
    if config.decode.method != "plain":
        values = open_critic(config.decode, policies[-1].model)
        methods.append(guided_method(agents[-1], taskset.env, values, config.decode))
    limits = rollout_limits(config)
    try:
        chosen = _select_methods(methods, config.methods)
        table = await make_table(chosen, taskset, config.evaluate_n, limits, progress)
        passed: dict[str, PassAtK] = {}
        k, size = config.pass_k, config.pass_attempts or config.pass_k
        for method in chosen if k else ():
            sampling = replace(method, agent=with_temperature(method.agent, 1.0))
            passed[method.name] = await measure_pass_at_k(
                sampling, taskset, config.evaluate_n, k, size, limits, progress
            )
        return replace(table, passed=passed)
    finally:
        await close_environments(taskset)
        for engine in engines:
            await engine.close()


def _select_methods(methods: Sequence[Method], names: Sequence[str]) -> list[Method]:
    known = [method.name for method in methods]
    for name in names:
        if name not in known:
            raise InvalidInput("--methods", got=repr(name), do=f"choose from {', '.join(known)}")
    return [method for method in methods if not names or method.name in names]
