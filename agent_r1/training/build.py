"""Everything that is checked and built before a run leaves a trace on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.algorithms.algorithm import Algorithm
from agent_r1.algorithms.registry import find_algorithm, parameters
from agent_r1.algorithms.validation import check_context_rewriting
from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env, RolloutContext
from agent_r1.core.errors import InvalidInput, UnsupportedChat
from agent_r1.core.inference import InferenceEngine, SamplingParams
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.model.load import load_model, load_stop_ids, load_tokenizer
from agent_r1.renderers.formats.detect import open_renderer, require_tools
from agent_r1.renderers.template_renderer import TemplateRenderer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.collector import RolloutLimits, GroupRequest
from agent_r1.rollout.context_policy import Append, build_context_policy
from agent_r1.rollout.user_code import isolate
from agent_r1.tasksets.tinywiki.model import TINY_BASE, TINY_BASE_FOLDER
from agent_r1.training.config import RunConfig, TrainConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

OPENING_SECONDS = 60.0
"""How long an environment may take to open before a run begins."""

CHECKED_PROMPTS = 8
"""Prompts per split whose tokens are counted before anything starts: those of most characters."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model that can talk: weights, tokenizer, chat format, and how many tokens it can see."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: TemplateRenderer
    context: int

    def agent(self, engine: InferenceEngine, config: RunConfig, temperature: float) -> Agent:
        """This policy, acting through ``engine``."""
        sampling = SamplingParams(temperature, max_tokens=config.max_tokens)
        return Agent(engine, self.renderer, sampling, self.context, config.seed, build_context_policy(config.context_policy))


def open_policy(config: RunConfig, taskset: TaskSet) -> Policy:
    """Load the configured model for a world. Raises InvalidInput where it cannot act there.

    ``config.context`` bounds the tokens of an episode; the model's own bound may be tighter.
    """
    name = str(TINY_BASE_FOLDER) if config.model == TINY_BASE else config.model
    tokenizer = load_tokenizer(name)
    try:
        renderer = open_renderer(tokenizer, config.tool_format, config.tags, load_stop_ids(name))
        if taskset.env.tools:
            require_tools(renderer, taskset.env.tools)
    except UnsupportedChat as error:
        raise InvalidInput("chat template", got=config.model, do=str(error)) from error
    model = load_model(name, DTYPES[config.dtype]).to(_device(config.device))  # type: ignore[arg-type]
    _check_vocabulary(model, tokenizer, config.model)
    return Policy(model, tokenizer, renderer, min(config.context, *_bounds(model)))


def check_view(config: TrainConfig, row: Algorithm) -> None:
    """Raise InvalidInput where the algorithm cannot learn from contexts that the rule rewrites."""
    if not isinstance(build_context_policy(config.context_policy), Append):
        check_context_rewriting(row)


RATIO_TERMS = ("loss", "ratio_level", "ratio_denominator")
"""Settings of an algorithm that have an effect only if the policy differs from the denominator of the ratio."""


def check_reuse(config: TrainConfig, row: Algorithm) -> None:
    """Raise InvalidInput where samples are used in a way that the algorithm's loss is not right or not made for."""
    reused = row.epochs * config.trainer.minibatches > 1 or config.max_staleness > 0
    if reused and not row.loss.uses_ratio and row.correction is None:
        got = f"{row.loss.name} with samples used more than once, or stale"
        do = "name a loss with a ratio (clip, importance_sampling): A log pi is right for fresh samples only"
        raise InvalidInput(f"algorithm {row.name}", got=got, do=do)
    if reused:
        return
    preset = find_algorithm(row.name)
    usual = parameters(row if preset is None else preset)
    for key, value in parameters(row).items():
        if key.partition(".")[0] in RATIO_TERMS and usual.get(key) != value:
            do = "set trainer.minibatches, algorithm.epochs or max_staleness too: in one pass over fresh samples r is 1"
            raise InvalidInput(f"algorithm.{key}", got=value, do=do)


def open_teacher(config: TrainConfig, row: Algorithm, policy: Policy) -> PreTrainedModel | None:
    """The model that an algorithm distils from, None where it does not. Raises InvalidInput where it cannot teach."""
    if "teacher" not in row.needs:
        if config.teacher:
            raise InvalidInput("teacher", got=config.teacher, do=f"leave it out: {row.name} has none")
        return None
    if not config.teacher:
        raise InvalidInput("teacher", got="none", do=f"name a model or a folder: {row.name} learns from one")
    name = str(TINY_BASE_FOLDER) if config.teacher == TINY_BASE else config.teacher
    if load_tokenizer(name).get_vocab() != policy.tokenizer.get_vocab():
        raise InvalidInput(
            "teacher", got=f"{config.teacher}, with another vocabulary", do="name one with the same tokens"
        )
    return load_model(name, DTYPES[config.dtype]).to(policy.model.device)  # type: ignore[arg-type]


def _device(name: str) -> str:
    """The device to compute on; 'auto' takes a GPU where there is one."""
    there = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if there else "cpu"
    if name.startswith("cuda") and not there:
        raise InvalidInput("device", got=name, do="use cpu or auto: torch sees no GPU on this machine")
    return name


def _bounds(model: PreTrainedModel) -> list[int]:
    """What bounds a sequence: the model's positions, and its sliding window, within which attention is plain."""
    settings = model.config.get_text_config()
    found = [getattr(settings, name, None) for name in ("max_position_embeddings", "sliding_window")]
    windowed = getattr(settings, "use_sliding_window", True)
    return [bound for bound, counts in zip(found, (True, windowed), strict=True) if bound and counts]


def _check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    rows = int(model.config.get_text_config().vocab_size)
    if len(tokenizer) > rows:
        got = f"{name}, whose tokenizer has {len(tokenizer)} tokens and whose model embeds {rows}"
        raise InvalidInput("model", got=got, do="name a folder whose model and tokenizer belong together")


def check_prompts(policy: Policy, env: Env, tasks: Sequence[Task]) -> None:
    """Raise InvalidInput where a task's opening leaves no token to answer with; the longest texts are looked at."""
    longest = sorted(tasks, key=lambda task: sum(len(message.text) for message in task.messages))[-CHECKED_PROMPTS:]
    for task in longest:
        tokens = len(policy.renderer.render(asyncio.run(_opening(env, task)), env.tools).token_ids)
        if tokens >= policy.context:
            raise InvalidInput(
                f"task {task.id}",
                got=f"a prompt of {tokens} tokens, where the model sees {policy.context}",
                do="shorten it, raise --context, or name a model that sees more",
            )


def check_taskset(policy: Policy, taskset: TaskSet, splits: Sequence[str]) -> None:
    """Raise InvalidInput where a split that will be used does not exist, is empty, or has a prompt too long."""
    for split in splits:
        tasks = taskset.tasks(split)
        if not tasks:
            raise InvalidInput(f"tasks of {taskset.name}", got=f"none in the split {split!r}", do="give some")
        check_prompts(policy, taskset.env_for_split(split), tasks)


def with_columns(taskset: TaskSet, splits: tuple[str, ...]) -> TaskSet:
    """The world whose table has these columns; its own where none are given."""
    return replace(taskset, evaluation=splits) if splits else taskset


async def _opening(env: Env, task: Task) -> tuple[Message, ...]:
    """The first messages of a task. Raises InvalidInput where the environment cannot open it, or not in time."""

    def refused(reason: str) -> InvalidInput:
        do = f"mend the environment, or the task: it is opened once before a run begins (in {OPENING_SECONDS:g} s)"
        return InvalidInput(f"task {task.id}", got=reason, do=do)

    with isolate(refused):
        async with asyncio.timeout(OPENING_SECONDS):
            episode = await env.open(task, RolloutContext(AttemptId("check", task.id, 0, 0), 0))
            await episode.close()
            return episode.start


def limits_of(config: RunConfig) -> RolloutLimits:
    return RolloutLimits(config.concurrency, config.episode_seconds, config.score_seconds, config.retries)


def orders(tasks: Sequence[Task], config: TrainConfig, first: int = 0) -> Iterator[GroupRequest]:
    """Groups without end, in order, from the serial number ``first`` on.

    Every epoch is a permutation that depends on the seed and the epoch alone.
    """
    for epoch in count(first // len(tasks)):
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
        permutation = torch.randperm(len(tasks), generator=generator).tolist()
        for serial, place in enumerate(permutation, start=epoch * len(tasks)):
            if serial >= first:
                yield GroupRequest(serial, tasks[place], config.group_size)
