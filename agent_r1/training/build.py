"""Build the services of a run. Only this module chooses the default implementations of engine and trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_r1.core.errors import EngineError, InvalidInput, suggest
from agent_r1.core.events import LogEvent
from agent_r1.core.inference import InferenceEngine
from agent_r1.core.profile import EngineMeter, MeteredEngine
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import RewardSchedule, Scorer
from agent_r1.gateway.agent_program import AgentProgramEnv
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.model.adapter import copy_sharing_frozen, count_adapter, load_trained_weights, trained_weights
from agent_r1.reward_models.judge import Judge, load_judge
from agent_r1.reward_models.network import RewardModelScorer, is_reward_model, load_reward_model
from agent_r1.rewards.scoring import TERMS, FunctionScorer, RewardFunction
from agent_r1.rollout.agent_loop import Agent
from agent_r1.rollout.scripted import ScriptedEngine
from agent_r1.tasksets.transcripts import Transcripts
from agent_r1.trainer.fsdp import FsdpTrainer, RankTrainer
from agent_r1.trainer.protocol import TrainerBackend
from agent_r1.trainer.ranks import LOCAL_RANKS, RankGroup, RankLauncher
from agent_r1.trainer.single_process import SingleProcessTrainer
from agent_r1.trainer.updater import PolicyUpdater
from agent_r1.training.config import RunConfig, TrainConfig
from agent_r1.training.memory_estimate import MemoryPlan, available_memory, plan_memory
from agent_r1.training.policy import Policy, load_teacher, load_trained_policy
from agent_r1.training.preflight import (
    check_algorithm_settings,
    check_examples,
    check_reward_weights,
    check_taskset,
    validation_splits,
)
from agent_r1.training.ray import RayCluster, RayRanks, RayServers
from agent_r1.training.servers import ServerLauncher, VllmServers, find_hardware, plan_devices
from agent_r1.training.sft import check_transcripts

DEVICES, LORA, MEMORY = "devices", "lora", "memory"
"""Kinds of the events in ``Runtime.events``."""


def extra_scorers(config: TrainConfig, taskset: TaskSet, tokenizer: PreTrainedTokenizerBase) -> tuple[Scorer, ...]:
    """Return the scorers of ``config.extra_rewards``. ``tokenizer`` belongs to the policy."""
    terms: dict[str, RewardFunction] = {}
    scorers: list[Scorer] = []
    for name, source in config.extra_rewards.items():
        if name in taskset.rewards:
            do = "give it another name: the task set has a reward of this name"
            raise InvalidInput(f"extra_rewards.{name}", got=source, do=do)
        if source in TERMS:
            terms[name] = TERMS[source]
        elif source.endswith(".toml"):
            scorers.append(Judge(name, load_judge(Path(source))))
        elif is_reward_model(Path(source)):
            scorers.append(RewardModelScorer(name, load_reward_model(Path(source), tokenizer)))
        else:
            do = f"give the folder of a reward model, a judge as FILE.toml, or one of {', '.join(TERMS)}"
            do = f"{suggest(Path(source).name, TERMS)} {do}".strip()
            raise InvalidInput(f"extra_rewards.{name}", got=source, do=do)
    return (FunctionScorer(terms), *scorers) if terms else tuple(scorers)


def _torch_engine(policy: Policy, config: RunConfig) -> InferenceEngine:
    return TorchEngine(policy.model, policy.context_length, config.engine, policy.images)


def _trainer(
    policy: Policy, config: TrainConfig, teacher: PreTrainedModel | None, *, launcher: RankLauncher = LOCAL_RANKS
) -> TrainerBackend:
    settings, temperature, model = config.trainer, config.temperature, policy.model
    if settings.ranks == 1:
        return SingleProcessTrainer(
            model, config.algorithm, settings, temperature=temperature, teacher=teacher, images=policy.images
        )
    if policy.images is not None:
        do = "leave it out: models with vision are trained by one rank"
        raise InvalidInput("trainer.ranks", got=settings.ranks, do=do)
    ranks = RankGroup[RankTrainer](settings.ranks, model.device.type, launcher)
    return FsdpTrainer(
        ranks, model, config.algorithm, settings, temperature=temperature, teacher=teacher, threads=config.threads
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The factories that make the engine and the trainer of a run; by default the embedded engine and one process."""

    # returns an engine that serves the policy's weights. The engine may keep and change ``policy.model``. With LoRA,
    # the frozen weights must stay unchanged, because the trainer shares these weights
    engine: Callable[[Policy, RunConfig], InferenceEngine] = _torch_engine
    # returns a trainer of the policy. The third argument is the teacher, or None
    trainer: Callable[[Policy, TrainConfig, PreTrainedModel | None], TrainerBackend] = _trainer
    # a text for the run's record, about the started processes and their machines; "" if all processes are on this
    # machine
    processes: str = ""


def resolve_placement(placement: Placement | None, config: RunConfig, folder: Path | None = None) -> Placement:
    """Return ``placement``, or the placement that the settings describe if ``placement`` is None."""
    if placement is not None:
        return placement
    ranks: RankLauncher = LOCAL_RANKS
    servers: ServerLauncher | None = None  # child processes
    processes = ""
    if config.placement.launcher == "ray":
        cluster = RayCluster(config, config.placement, find_hardware())
        ranks, servers = RayRanks(cluster), RayServers(cluster)
        processes = f"Ray: {cluster}"
    engine = VllmServers(folder, servers).engine if config.engine.backend == "vllm" else _torch_engine
    return Placement(engine, partial(_trainer, launcher=ranks), processes)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The services of a run, built and checked before the run writes a file."""

    config: TrainConfig
    taskset: TaskSet
    policy: Policy
    trainer: TrainerBackend
    updater: PolicyUpdater
    engine: InferenceEngine
    placement: Placement
    plan: MemoryPlan
    agent: Agent  # samples at the configured temperature
    meter: EngineMeter  # counts the requests of the agent to the engine
    extra_scorers: tuple[Scorer, ...]  # the scorers of the setting ``extra_rewards``
    events: tuple[LogEvent, ...]  # the events that the run records first


def build_runtime(
    config: TrainConfig, taskset: TaskSet, placement: Placement | None = None, folder: Path | None = None
) -> Runtime:
    """Check the inputs of a run, load its models, and return its services."""
    placement = resolve_placement(placement, config, folder)
    devices = placement.processes or str(plan_devices(config, find_hardware()))
    policy, extra, plan = load_and_check(config, taskset)
    trainer, updater = _make_trainer(config, policy, placement, plan)
    if config.acts:
        # The engine gets a copy, because the trainer changes the policy's weights while the engine samples attempts.
        engine = placement.engine(replace(policy, model=copy_sharing_frozen(policy.model)), config)
    else:
        engine = ScriptedEngine(policy.renderer, _refuse_to_sample)
    events, meter = tuple(_events(config, policy, plan, devices)), EngineMeter()
    agent = policy.agent(MeteredEngine(engine, meter), config, config.temperature)
    return Runtime(config, taskset, policy, trainer, updater, engine, placement, plan, agent, meter, extra, events)


def _refuse_to_sample(prompt: str) -> str:
    raise EngineError("a run on transcripts samples nothing")


def load_and_check(config: TrainConfig, taskset: TaskSet) -> tuple[Policy, tuple[Scorer, ...], MemoryPlan]:
    """Load the policy, and check that it fits the settings, the algorithm, the tasks and the memory."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    check_algorithm_settings(config)
    check_reward_weights(config, taskset)
    if config.algorithm.advantage.continuations_per_turn and isinstance(taskset.env, AgentProgramEnv):
        do = "name another: an agent program cannot be replayed, only the agent loop"
        raise InvalidInput("algorithm", got=config.algorithm.name, do=do)
    policy = load_trained_policy(config, taskset)
    splits = ["train", *taskset.evaluation, *validation_splits(config, taskset)]
    check_taskset(policy, taskset, splits)
    check_examples(config, taskset)
    if isinstance(taskset.env, Transcripts):
        check_transcripts(policy, config, taskset.env)
    extra = extra_scorers(config, taskset, policy.tokenizer)
    plan = plan_memory(policy.model, config, policy.context_length, available_memory(policy.model.device))
    return policy, extra, plan


def rebuild_trainer(runtime: Runtime) -> Runtime:
    """Return a copy of ``runtime`` with a new trainer and the initial weights. Close the old trainer before."""
    config, policy = runtime.config, runtime.policy
    torch.manual_seed(config.seed)
    load_trained_weights(policy.model, trained_weights(load_trained_policy(config, runtime.taskset).model))
    plan = replace(runtime.plan, micro_tokens=runtime.updater.micro_tokens)
    trainer, updater = _make_trainer(config, policy, runtime.placement, plan)
    return replace(runtime, trainer=trainer, updater=updater, plan=plan)


def _make_trainer(
    config: TrainConfig, policy: Policy, placement: Placement, plan: MemoryPlan
) -> tuple[TrainerBackend, PolicyUpdater]:
    fits = {"micro_tokens": plan.micro_tokens, "activation_checkpointing": plan.activation_checkpointing}
    fitting = config.trainer.model_copy(update=fits)
    trainer = placement.trainer(policy, config.model_copy(update={"trainer": fitting}), load_teacher(config, policy))
    updater = PolicyUpdater(
        trainer,
        config.algorithm,
        fitting,
        reward_weights=config.reward_weights,
        reward_schedules={name: RewardSchedule.parse(text) for name, text in config.reward_schedules.items()},
        seed=config.seed,
        steps=config.steps,
        record_groups=config.record_tokens,
        example_coef=config.example_coef,
    )
    return trainer, updater


def _events(config: TrainConfig, policy: Policy, plan: MemoryPlan, devices: str) -> Iterator[LogEvent]:
    if devices:
        yield LogEvent(DEVICES, devices)
    trained, total = count_adapter(policy.model), policy.model.num_parameters()
    if trained:
        detail = f"rank {config.trainer.lora.rank}: {trained:,} weights are trained, {total - trained:,} are frozen"
        yield LogEvent(LORA, detail)
    if plan.micro_tokens < config.trainer.micro_tokens:
        detail = f"micro-batches have {plan.micro_tokens} tokens instead of {config.trainer.micro_tokens}, so that"
        yield LogEvent(MEMORY, f"{detail} the run takes about {plan}")
    if plan.activation_checkpointing and not config.trainer.activation_checkpointing:
        yield LogEvent(MEMORY, "activations are computed twice (trainer.activation_checkpointing), to fit into memory")
    if not plan.copies:
        yield LogEvent(MEMORY, "training waits while a checkpoint is written, because a copy of it would not fit")
