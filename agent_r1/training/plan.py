"""``agent-r1 plan``: predict the step time of a planned run, on GPUs or on the machine where other runs were recorded.

For GPUs, the memory is also predicted.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Group as Lines
from rich.table import Table as Grid
from rich.text import Text
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agent_r1.core.errors import InvalidInput, suggest
from agent_r1.model.folders import find_folder
from agent_r1.model.load import quiet_transformers
from agent_r1.model.pass_memory import kv_bytes_per_token
from agent_r1.model.weights import DTYPES
from agent_r1.training.memory_estimate import GIB, plan_memory
from agent_r1.training.plan_config import GPUS, MODEL_SHAPES, Gpu, PlanConfig
from agent_r1.training.servers import gpus_per_server
from agent_r1.training.simulation import AttemptLoad, Cluster, GroupLoad, Schedule, TurnLoad, simulate
from agent_r1.training.step_costs import ModelSize, RecordedRun, engine_on, measure_cluster, slower, trainer_on

STEPS, RECORDED_STEPS = 6, 24
""":func:`plan_cluster` simulates ``STEPS`` steps. :func:`plan_recorded` simulates ``RECORDED_STEPS`` steps."""

MAX_ENGINES = 8
"""The largest number of simulated engines. If a run has more engines, only ``MAX_ENGINES`` engines are simulated, and
the number of simulated attempts is reduced by the same factor."""

USABLE_MEMORY = 0.9

LENGTH_SPREAD = 0.6
"""The standard deviation of log(n), for the random number n of tokens in an action.

If recorded attempts are given, the recorded numbers of tokens are used instead.
"""

P99 = 2.326

KV_SHARE = 0.3
"""The share of a GPU's memory for the KV cache if trainer and embedded engine share the GPU."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The predicted step of a run.

    Attributes:
        max_staleness: the largest staleness; 0 for synchronous training.
        step_seconds: the duration of the step.
        engine_utilization, trainer_utilization: the share of the time in which the engines or the trainer compute.
        tokens_per_second: all tokens of the step (prompts, tool results and actions), divided by ``step_seconds``.
    """

    max_staleness: int
    step_seconds: float
    engine_utilization: float
    trainer_utilization: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of ``agent-r1 plan``.

    Attributes:
        machine: the hardware and its division between trainer and engines, as text.
        memory: lines about the trainer's GPU and the KV cache of an engine; () from :func:`plan_recorded`.
        predictions: two entries: the prediction for a step of synchronous training, and the prediction for a step of
            asynchronous training.
    """

    machine: str
    memory: tuple[str, ...]
    predictions: tuple[StepPrediction, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def render_plan(plan: Plan) -> Lines:
    grid = Grid("max_staleness", "seconds per step", "engine", "trainer", "tokens/s", box=box.SIMPLE_HEAD)
    for found in plan.predictions:
        shares = (f"{100 * share:.0f} %" for share in (found.engine_utilization, found.trainer_utilization))
        seconds, tokens = f"{found.step_seconds:.3g}", f"{found.tokens_per_second:.3g}"
        grid.add_row(str(found.max_staleness), seconds, *shares, tokens)
    return Lines(Text(f"predicted, not measured: {plan.machine}"), *map(Text, plan.memory), grid)


def plan_recorded(config: PlanConfig, runs: Sequence[RecordedRun]) -> Plan:
    """Return how long a training step with the settings ``config`` will take on the machine that recorded ``runs``."""
    cluster = slower(measure_cluster(runs, config.clock), config.load)
    groups = _draw_groups(config, RECORDED_STEPS * config.groups_per_step, runs[0].groups)
    machine = f"the machine of the recorded run, by its {config.clock} time"
    return Plan(machine, (), _predict(config, cluster, groups, RECORDED_STEPS))


def plan_cluster(config: PlanConfig, recorded: Sequence[GroupLoad] = ()) -> Plan:
    """Return the memory per GPU and the duration of a training step on the GPUs of ``config``.

    The training step is simulated. The attempts in the simulation are drawn from the groups in ``recorded``. If
    ``recorded`` is empty, ``config`` determines the sizes of the attempts. If there are several GPUs and
    ``trainer.ranks`` is not set, plans are made with 1/8, 2/8, .. 7/8 of the GPUs for the trainer, and the fastest plan
    is returned.

    Raises InvalidInput if the run does not fit into memory. The error suggests settings that need less memory.
    """
    gpu, model = _gpu_of(config), shape_of(config.model)
    if "ranks" in config.trainer.model_fields_set or config.gpus == 1:
        return _plan_division(config, gpu, model, config.trainer.ranks, recorded)
    plans, refused = list[Plan](), list[InvalidInput]()
    for ranks in sorted({max(1, config.gpus * eighths // 8) for eighths in range(1, 8)}):
        try:
            plans.append(_plan_division(config, gpu, model, ranks, recorded))
        except InvalidInput as error:
            refused.append(error)
    if not plans:
        raise refused[-1]
    return min(plans, key=lambda plan: plan.predictions[-1].step_seconds)


def _plan_division(
    config: PlanConfig, gpu: Gpu, model: PreTrainedModel, ranks: int, recorded: Sequence[GroupLoad]
) -> Plan:
    config = _with_division(config, ranks)
    is_shared = config.gpus == 1
    each = 1 if is_shared else gpus_per_server(config.engine)
    engines = 1 if is_shared else (config.gpus - ranks) // each
    if engines < 1:
        do = f"give fewer trainer.ranks, or more gpus: a server needs {each}"
        raise InvalidInput("gpus", got=f"{config.gpus}, of which the trainer takes {ranks}", do=do)
    usable = USABLE_MEMORY * gpu.memory * GIB
    if is_shared and config.engine.kv_cache_gib is None:
        engine = config.engine.model_copy(update={"kv_cache_gib": KV_SHARE * gpu.memory})
        config = config.model_copy(update={"engine": engine})
    policy = model.num_parameters() * (DTYPES[config.trainer.dtype].itemsize if config.trainer.lora.rank else 4)
    memory = plan_memory(model, config, config.context, int(usable - policy))
    size = model_size(model, config)
    kv_tokens = kv_capacity(config, gpu, size, each)
    engine_cost = engine_on(gpu, size, each, config.engine.max_sequences, kv_tokens)
    cluster = Cluster(engines, engine_cost, trainer_on(gpu, size, ranks, config.mfu), is_shared)

    name = f"{config.gpus} x {config.gpu}"
    division = "shared by trainer and engine" if is_shared else f"{ranks} for the trainer, {engines} engines of {each}"
    weights = f"policy {policy / GIB:.1f} GiB, and {memory}"
    shown = [f"memory of the trainer's GPU (of {usable / GIB:.0f} GiB usable): {weights}"]
    if not is_shared:
        shown.append(f"KV cache of an engine: {kv_tokens:,.0f} tokens")
    part = max(1, round(config.groups_per_step * min(1.0, MAX_ENGINES / engines)))
    groups = _draw_groups(config, STEPS * part, recorded)
    return Plan(f"{name}, {division}", tuple(shown), _predict(config, cluster, groups, STEPS))


def _with_division(config: PlanConfig, ranks: int) -> PlanConfig:
    # In the copy, ``engine.backend`` is "embedded" if ``config.gpus`` is 1, and "vllm" otherwise.
    backend = "embedded" if config.gpus == 1 else "vllm"
    update = {
        "trainer": config.trainer.model_copy(update={"ranks": ranks, "share_prefixes": "off"}),
        "engine": config.engine.model_copy(update={"backend": backend}),
    }
    return config.model_copy(update=update)


def kv_capacity(config: PlanConfig, gpu: Gpu, size: ModelSize, gpus: int) -> float:
    """Return the number of tokens in a full KV cache of an engine on ``gpus`` GPUs.

    A vLLM server uses the memory that its weights leave free. Raises InvalidInput if this memory cannot hold
    ``config.context`` tokens.
    """
    if config.gpus == 1:
        assert config.engine.kv_cache_gib is not None
        return config.engine.kv_cache_gib * GIB / size.kv_bytes
    weights, usable = size.weights * size.served_bytes, USABLE_MEMORY * gpu.memory * GIB * gpus
    tokens = (usable - weights) / size.kv_bytes
    if tokens < config.context:
        got = f"{usable / GIB:.0f} GiB for an engine, but {weights / GIB:.1f} GiB of weights"
        got += (
            f" and {config.context * size.kv_bytes / GIB:.1f} GiB for a context of {config.context} tokens are needed"
        )
        needed = math.ceil((weights + config.context * size.kv_bytes) / (usable / gpus))
        do = f"give --engine.vllm.arguments '--tensor-parallel-size {2 ** math.ceil(math.log2(max(2, needed)))}'"
        raise InvalidInput("memory", got=got, do=do)
    return tokens


def model_size(model: PreTrainedModel, config: PlanConfig) -> ModelSize:
    """Return the numbers on which the costs of a model depend.

    ``passes`` is the cost of an update, in forward passes:

    - Policy: 1 for the forward pass, and 2 for the backward pass (with an adapter 1). Activation checkpointing adds 1.
    - Critic, if there is one: the same cost as the policy.
    - Reference and teacher: 1 each.
    - log pi_old: 1, if a batch has several optimizer steps.
    """
    needs, trainer = config.algorithm.needs, config.trainer
    trained = 1 + (1 if trainer.lora.rank else 2) + trainer.activation_checkpointing
    frozen = ("reference" in needs) + ("teacher" in needs) + (config.algorithm.epochs * trainer.minibatches > 1)
    return ModelSize(
        weights=model.num_parameters(),
        served_bytes=DTYPES[config.engine.dtype].itemsize,
        kv_bytes=kv_bytes_per_token(model, config.engine.dtype),
        passes=trained * (1 + ("critic" in needs)) + frozen,
    )


def shape_of(name: str) -> PreTrainedModel:
    """Return a model without weights (on the device "meta"), given its name, its folder or its ``config.json``.

    Raises InvalidInput if there is no such model.
    """
    with quiet_transformers(), torch.device("meta"):
        if name.lower() in MODEL_SHAPES:
            kind, shape = MODEL_SHAPES[name.lower()]
            config = AutoConfig.for_model(kind, **shape)
        elif name.endswith(".json"):
            config = _read_shape(Path(name))
        else:
            config = AutoConfig.from_pretrained(find_folder(name, "model"))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model


def _read_shape(path: Path) -> Any:
    try:
        values = json.loads(path.read_text("utf-8"))
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        known = ", ".join(MODEL_SHAPES)
        do = f"give the config.json of a language model, a folder, or one of: {known} ({type(error).__name__}: {error})"
        raise InvalidInput("model", got=str(path), do=do) from error


def _gpu_of(config: PlanConfig) -> Gpu:
    if config.gpu.lower() not in GPUS:
        do = f"{suggest(config.gpu.lower(), GPUS)} there are: {', '.join(GPUS)}; or give a recorded run".strip()
        raise InvalidInput("gpu", got=config.gpu or "nothing", do=do)
    known = GPUS[config.gpu.lower()]
    return Gpu(
        config.gpu_memory or known.memory, config.gpu_tflops or known.tflops, config.gpu_bandwidth or known.bandwidth
    )


def _draw_groups(config: PlanConfig, count: int, recorded: Sequence[GroupLoad]) -> list[GroupLoad]:
    draw = random.Random(config.seed)
    recorded = [group for group in recorded if group]

    def draw_group() -> GroupLoad:
        if not recorded:
            return tuple(_draw_attempt(config, draw) for _ in range(config.group_size))
        group = draw.choice(recorded)
        attempts = [draw.choice(group) for _ in range(config.group_size)]
        return tuple(_with_tools(attempt, config, draw) for attempt in attempts)

    return [draw_group() for _ in range(count)]


def _draw_attempt(config: PlanConfig, draw: random.Random) -> AttemptLoad:
    mean = math.log(config.action_tokens) - LENGTH_SPREAD**2 / 2

    def turns() -> Iterator[TurnLoad]:
        for number in range(config.turns):
            length = min(config.max_tokens, max(1, round(draw.lognormvariate(mean, LENGTH_SPREAD))))
            yield TurnLoad(config.prompt_tokens if number == 0 else config.result_tokens, length)

    return _with_tools(tuple(turns()), config, draw)


def _with_tools(attempt: AttemptLoad, config: PlanConfig, draw: random.Random) -> AttemptLoad:
    if config.tool_seconds is None:
        return attempt
    median, high = config.tool_seconds, config.tool_p99
    spread = math.log(max(high / median, 1.0)) / P99 if median and high else 0.0
    last = replace(attempt[-1], tool_seconds=0.0)
    return (*(replace(turn, tool_seconds=median * math.exp(spread * draw.gauss(0, 1))) for turn in attempt[:-1]), last)


def _predict(
    config: PlanConfig, cluster: Cluster, groups: Sequence[GroupLoad], steps: int
) -> tuple[StepPrediction, ...]:
    engines = min(cluster.engines, MAX_ENGINES)
    size = len(groups) // steps
    share = size / config.groups_per_step
    trainer = replace(cluster.trainer, token=cluster.trainer.token / share)
    part = replace(cluster, engines=engines, trainer=trainer)
    tokens = sum(turn.new_tokens + turn.action_tokens for group in groups for attempt in group for turn in attempt)
    found = []
    for staleness in (0, max(1, config.max_staleness)):
        line = simulate(groups, part, Schedule(size, staleness, max(1, round(config.concurrency * share))))
        per_second = tokens / steps / share / line.step_seconds
        shares = (line.engine_utilization, line.trainer_utilization)
        found.append(StepPrediction(staleness, line.step_seconds, *shares, per_second))
    return tuple(found)
