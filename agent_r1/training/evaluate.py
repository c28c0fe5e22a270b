"""Evaluation of methods: baselines, the base model and the trained model."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from agent_r1.chat_api import ChatApi
from agent_r1.core.environment import Env, env_of
from agent_r1.core.errors import AgentR1Error, InvalidInput, read_credential
from agent_r1.core.inference import InferenceEngine, SamplingParams, ValueFunction
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Group, Scorer, Trajectory
from agent_r1.gateway.agent_program import AgentProgramEnv
from agent_r1.inference.config import DecodeConfig
from agent_r1.rewards.scoring import final_answer, final_text
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.api_agent import ApiAgent, UsageMeter
from agent_r1.rollout.beam import BeamSearch, TurnBeam
from agent_r1.rollout.collector import Collector, GroupRequest, NullRecorder, RolloutLimits
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.rollout.session import Rollout
from agent_r1.store.reader import RunReader
from agent_r1.store.saved_weights import find_folder, named_run
from agent_r1.training.config import EvalConfig
from agent_r1.training.environments import close_environments, make_rollout, rollout_limits, with_environments
from agent_r1.training.metrics import (
    EXACT_MATCH,
    EvalResult,
    majority_score,
    mean_logprob,
    pass_at_k,
    score_trajectory,
    sum_rewards,
)
from agent_r1.training.preflight import check_taskset
from agent_r1.training.progress import Progress, format_duration
from agent_r1.training.tables import Cell, PassAtK, SampledCell, Table, TaskResult, make_cell, normal_interval

if TYPE_CHECKING:
    from agent_r1.training.build import Placement
    from agent_r1.training.policy import Policy

BASE = "base-tool-call"
TRAINED = "trained"
VALUE_GUIDED = "value-guided"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the result table: ``agent`` makes attempts in ``env``, perhaps by a beam search over actions."""

    name: str
    agent: Agent | ApiAgent
    env: Env
    search: BeamSearch | None = None

    def rollout(self) -> Rollout:
        """Return the rollout that makes the attempts. Raise InvalidInput for a beam search with an agent program."""
        if self.search is None or isinstance(self.agent, ApiAgent):
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


def with_temperature(agent: Agent | ApiAgent, temperature: float) -> Agent | ApiAgent:
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
    for split in _splits_of(method, taskset):
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
    likeliest = [max(zip(*question, strict=True))[1] for question in zip(logprobs, em, strict=True)]
    return SampledCell(
        statistics.fmean(ones),
        *normal_interval(ones),
        any=statistics.fmean(pass_at_k(len(scores), scores.count(1.0), k) for scores in em),
        majority=statistics.fmean(votes) if any(any(given) for given in answers) else None,
        likeliest=statistics.fmean(likeliest) if any(map(math.isfinite, chain(*logprobs))) else None,
    )


def list_methods(taskset: TaskSet, base: Agent, trained: Agent | None = None) -> list[Method]:
    """Return the methods to evaluate: the baselines, the base model with tools, and (if given) the trained agent."""
    rows = [Method(name, base, env) for name, env in taskset.baselines.items()]
    rows.append(Method(BASE, base, taskset.env))
    return rows if trained is None else [*rows, Method(TRAINED, trained, taskset.env)]


API_TRIES = 8
"""The maximum number of requests for one answer of an API. The last pauses together take two minutes."""

API_KEYS = ("AGENT_R1_API_KEY", "OPENAI_API_KEY")
"""The environment variables that can hold the key of an API. The first one that is set counts."""


def api_methods(config: EvalConfig, taskset: TaskSet) -> list[Method]:
    """Return a method for each model of ``config.api_model``. Raise InvalidInput for settings without an effect."""
    if config.api_model and not isinstance(build_context_policy(config.context_policy), Append):
        do = "leave it out: the tokens of a model behind an API are not known before it answers"
        raise InvalidInput("context_policy", got=f"{config.context_policy.name} with api_model", do=do)
    if config.api_model and isinstance(taskset.env, AgentProgramEnv):
        do = "leave it out: an agent program calls the policy, and can call the API itself"
        raise InvalidInput("api_model", got=f"{', '.join(config.api_model)} with an agent program", do=do)
    if config.decode.method != "plain" and not config.model:
        raise InvalidInput("decode.method", got=f"{config.decode.method} without a model", do="give --model")
    key = next(filter(None, map(read_credential, API_KEYS)), "") if config.api_model else ""
    url = config.api_url.rstrip("/").removesuffix("/chat/completions")
    api = ChatApi(url, key, config.api_seconds, API_TRIES, concurrency=config.concurrency)
    params, prices = SamplingParams(max_tokens=config.max_tokens), config.api_prices
    meters = [UsageMeter(prices[2 * number : 2 * number + 2]) for number in range(len(config.api_model))]
    return [
        Method(name, ApiAgent(api, name, params, config.context, config.seed, meter), taskset.env)
        for name, meter in zip(config.api_model, meters, strict=True)
    ]


def guided_method(agent: Agent, env: Env, values: ValueFunction, decode: DecodeConfig) -> Method:
    """Return a method in which ``agent`` acts in ``env``, and ``values`` guide the choice of actions."""
    if decode.method == "beam":
        search = BeamSearch(values, decode.beams, decode.candidates, decode.temperature)
        return Method(VALUE_GUIDED, agent, env, search)
    from agent_r1.inference.guidance import ValueGuidedEngine

    return Method(VALUE_GUIDED, replace(agent, engine=ValueGuidedEngine(agent.engine, values, decode)), env)


def measure_retrieval(taskset: TaskSet) -> dict[str, Mapping[str, float]]:
    """Return the measures of the task set's retriever, such as its recall, for each evaluation split that has any."""
    if taskset.retrieval is None:
        return {}
    measured = {split: taskset.retrieval(split) for split in taskset.evaluation}
    return {split: values for split, values in measured.items() if values}


def _splits_of(method: Method, taskset: TaskSet) -> list[str]:
    # The splits that the method can solve: a baseline of a mixture can be one of some parts only.
    return [split for split in taskset.evaluation if all(_has_env(method, task) for task in taskset.tasks(split))]


def _has_env(method: Method, task: Task) -> bool:
    try:
        env_of(method.env, task)
    except InvalidInput:
        return False
    return True


async def make_table(
    methods: Sequence[Method], taskset: TaskSet, count: int, limits: RolloutLimits, progress: Progress
) -> Table:
    """Return the table of one greedy attempt per method at each of the first ``count`` tasks of each split.

    Raise AgentR1Error with the most frequent reason if every attempt failed.
    """
    cells: dict[str, dict[str, Cell | None]] = {method.name: {} for method in methods}
    measures: dict[str, dict[str, Mapping[str, float]]] = {method.name: {} for method in methods}
    tasks: list[TaskResult] = []
    measured, began = set[str](), time.monotonic()
    failures: Counter[str] = Counter()
    progress.print_line(f"evaluating {', '.join(method.name for method in methods)} on {', '.join(taskset.evaluation)}")
    work = [(method, split) for method in methods for split in _splits_of(method, taskset)]
    for done, (method, split) in enumerate(work, 1):
        trajectories = await greedy_attempts(method, taskset, split, count, limits, progress)
        results = [score_trajectory(trajectory) for trajectory in trajectories]
        cell = cells[method.name][split] = make_cell(results)
        tasks += map(partial(_task_result, method.name, split), trajectories, results)
        measures[method.name][split] = extra_measures(taskset, trajectories)
        _report_failures(method.name, split, results, progress)
        failures.update(result.failure for result in results if result.failure is not None)
        measured.update(result.measure for result in results if result.failure is None)
        left = (time.monotonic() - began) / done * (len(work) - done)
        found = "all failed" if cell is None else f"{cell.em:z.2f}"
        progress.print_line(f"{method.name}: {split} {found}" + (f"  {format_duration(left)} left" if left else ""))
    if failures and all(cell is None for row in cells.values() for cell in row.values()):
        reason, times = failures.most_common(1)[0]
        raise AgentR1Error(
            f"every attempt of the evaluation failed, {times} of {failures.total()} for this reason: {reason}"
        )
    measure = " or ".join(sorted(measured)) or EXACT_MATCH  # parts of a mixture can have different ones
    own_measures = measures if taskset.measures is not None else {}
    return Table(cells, measure_retrieval(taskset), measure, own_measures, tasks=tuple(tasks))


def _task_result(method: str, split: str, attempt: Trajectory, result: EvalResult) -> TaskResult:
    em = result.em if result.failure is None else None
    totals, answer = sum_rewards(attempt), final_answer(attempt) or final_text(attempt)
    return TaskResult(method, split, attempt.attempt.task, attempt.status.value, em, totals, answer, result.failure)


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
    taskset = with_environments(replace(taskset, evaluation=config.splits or taskset.evaluation), config)
    named, names = named_run(config.model), [config.model] if config.model else []
    if named is not None:
        with closing(RunReader(named[0])) as reader:
            names = [str(reader.config()["model"]), find_folder(config.model)]  # the base model, and the trained one
        if names[0] in config.own_code:  # the trained model has the code of its base
            config = config.model_copy(update={"own_code": (*config.own_code, *names)})
    behind_api = api_methods(config, taskset)
    policies: list[Policy] = []
    if names:  # imported here, because models behind an API need no torch
        import torch

        from agent_r1.training.build import resolve_placement
        from agent_r1.training.policy import load_policy

        torch.set_num_threads(config.threads)
        placement = resolve_placement(placement, config)
        configs = (config.model_copy(update={"model": name}) for name in names)
        policies = [load_policy(one, taskset, config.engine.dtype) for one in configs]
    check_taskset(policies[-1] if policies else None, taskset, taskset.evaluation)
    engines = [placement.engine(policy, config) for policy in policies] if placement else []
    return asyncio.run(_evaluate(config, taskset, policies, engines, behind_api, progress))


async def _evaluate(
    config: EvalConfig,
    taskset: TaskSet,
    policies: Sequence[Policy],
    engines: Sequence[InferenceEngine],
    behind_api: Sequence[Method],
    progress: Progress,
) -> Table:
    agents = [policy.agent(engine, config, 0.0) for policy, engine in zip(policies, engines, strict=True)]
    methods = list_methods(taskset, agents[0], *agents[1:]) if agents else []
    if not agents:
        progress.print_line(f"no --model, so these rows are left out: {', '.join((*taskset.baselines, BASE))}")
    elif config.decode.method != "plain":
        from agent_r1.training.policy import open_critic

        values = open_critic(config.decode, policies[-1].model)
        methods.append(guided_method(agents[-1], taskset.env, values, config.decode))
    limits = rollout_limits(config)
    try:
        chosen = _select_methods([*methods, *behind_api], config.methods, config.labels)
        for api in {method.agent.api for method in chosen if isinstance(method.agent, ApiAgent)}:
            await api.check_reachable()
        table = await make_table(chosen, taskset, config.evaluate_n, limits, progress)
        passed: dict[str, PassAtK] = {}
        k, size = config.pass_k, config.pass_attempts or config.pass_k
        for method in chosen if k else ():
            sampling = replace(method, agent=with_temperature(method.agent, 1.0))
            passed[method.name] = await measure_pass_at_k(
                sampling, taskset, config.evaluate_n, k, size, limits, progress
            )
        usage = {method.name: method.agent.meter.usage for method in chosen if isinstance(method.agent, ApiAgent)}
        return replace(table, passed=passed, usage=usage)
    finally:
        await close_environments(taskset)
        for engine in engines:
            await engine.close()


def _select_methods(methods: Sequence[Method], names: Sequence[str], labels: Sequence[str]) -> list[Method]:
    renamed = {row: name for row, _, name in (label.partition("=") for label in labels)}
    known = [method.name for method in methods]
    for option, given in (("--methods", names), ("--labels", renamed)):
        for name in given:
            if name not in known:
                raise InvalidInput(option, got=repr(name), do=f"choose from {', '.join(known)}")
    # who names a model behind an API wants its row
    chosen = [each for each in methods if not names or each.name in names or isinstance(each.agent, ApiAgent)]
    shown = [replace(method, name=renamed.get(method.name, method.name)) for method in chosen]
    if len({method.name for method in shown} - {""}) < len(shown):
        rows = ", ".join(method.name for method in shown)
        raise InvalidInput("--labels", got=f"the rows {rows}", do="give each row a name of its own, as ROW=NAME")
    return shown
