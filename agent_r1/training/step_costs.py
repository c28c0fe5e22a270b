"""The costs of engines and trainers for a simulation: measured in a recorded run, or computed for a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from agent_r1.core.errors import InvalidInput
from agent_r1.core.profile import Part, PartTime, StepProfile, read_profiles
from agent_r1.core.trajectory import Trajectory
from agent_r1.store.reader import RunReader
from agent_r1.training.plan_config import Gpu
from agent_r1.training.simulation import (
    AttemptLoad,
    Cluster,
    EngineCost,
    GroupLoad,
    Schedule,
    TrainerCost,
    TurnLoad,
    simulate,
)

Clock = Literal["wall", "cpu"]

IN_PROCESS_SECONDS = 0.1
"""The shortest duration of a turn's tools, in seconds, that a simulation adds as a pause after the turn.

Tools that took less time than this are simulated as if they took no time.
"""

ROUNDS = 4

BANDWIDTH_SHARE = 0.7

PREFILL_SHARE = 0.5

STEP_SECONDS = 0.003
"""The seconds of a decode step that are spent outside the model: scheduling, launches of kernels, sampling."""

PUBLISH_BYTES_PER_SECOND = 2e9
"""The speed at which weights reach the servers, through a folder in memory."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The settings, the groups of each step, and the profiles of a run."""

    config: Mapping[str, Any]
    steps: tuple[tuple[GroupLoad, ...], ...]
    profiles: tuple[StepProfile, ...]

    @property
    def groups(self) -> tuple[GroupLoad, ...]:
        return tuple(group for groups in self.steps for group in groups)


def read_profiled_run(folder: Path) -> RecordedRun:
    """Return the attempts and profiles of the run in ``folder``.

    Raises InvalidInput if the run was recorded without ``--profile``, or not with the embedded engine.
    """
    run = read_run(folder)
    if run.config["engine"]["backend"] != "embedded":
        do = "give a run of the embedded engine: runs on servers record no costs of decode steps; or give --gpu"
        raise InvalidInput("run", got=f"{folder}, with engine.backend {run.config['engine']['backend']}", do=do)
    if not run.profiles:
        do = "record one with --profile 1, or give --gpu for the costs of a GPU"
        raise InvalidInput("run", got=f"{folder}, without profiles", do=do)
    return run


def read_run(folder: Path) -> RecordedRun:
    """Return the attempts of the run in ``folder``, and its profiles, if any.

    Raises InvalidInput if the run has no step.
    """
    with closing(RunReader(folder)) as reader:
        config = reader.config()
        steps = {fate.attempt: fate.step for fate in reader.fates()}
        by_group: dict[tuple[int, int], list[AttemptLoad]] = defaultdict(list)
        for trajectory in reader.trajectories("train"):
            if trajectory.attempt in steps and trajectory.turns:
                place = (steps[trajectory.attempt], trajectory.attempt.group_id)
                by_group[place].append(_load_of(trajectory))
        profiles = read_profiles({name: reader.curve(name) for name in reader.metric_names() if "profile" in name})
    numbers = sorted({step for step, _ in by_group})
    if not numbers:
        raise InvalidInput("run", got=f"{folder}, without a step", do="give a run with at least one step")
    groups = tuple(tuple(tuple(by_group[place]) for place in sorted(by_group) if place[0] == step) for step in numbers)
    return RecordedRun(config, groups, tuple(profiles))


def _load_of(trajectory: Trajectory) -> AttemptLoad:
    loads = []
    for turn in trajectory.turns:
        seconds = 0.0 if turn.timing is None else turn.timing.env_seconds
        loads.append(
            TurnLoad(len(turn.new_ids), len(turn.action_ids), seconds if seconds >= IN_PROCESS_SECONDS else 0.0)
        )
    return tuple(loads)


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    return Schedule(config["groups_per_step"], config["max_staleness"], config["concurrency"])


def measure_cluster(runs: Sequence[RecordedRun], clock: Clock) -> Cluster:
    """Return the costs of the embedded engine and its trainer, measured in recorded runs of one machine.

    The costs of the engine are fitted to the recorded times of all steps. The fit is more precise if the decode batches
    have different sizes. So give several runs, for example a run with slow tools, which has small decode batches.
    """
    observed = [
        (run, groups, profile) for run in runs for groups, profile in zip(run.steps, run.profiles, strict=False)
    ]

    def seconds(*parts: Part) -> list[float]:
        return [sum(_seconds(profile, part, clock) for part in parts) for _, _, profile in observed]

    around = (Part.RENDERING, Part.REWARDS, Part.STORE, Part.OTHER, *((Part.TOOLS,) if clock == "cpu" else ()))
    turns = [turn for _, groups, _ in observed for group in groups for attempt in group for turn in attempt]
    trained = sum(turn.new_tokens + turn.action_tokens for turn in turns)
    trainer = TrainerCost(
        update=fmean(seconds(Part.OPTIMIZER)),
        token=sum(seconds(Part.PACKING, Part.FORWARD, Part.BACKWARD)) / trained,
        publish=fmean(seconds(Part.PUBLISH)),
    )
    rows = max(run.config["engine"]["max_sequences"] for run in runs)
    engine = EngineCost(step=1e-3, prefill_pass=1e-3, request=1e-4, rows=rows)
    for _ in range(ROUNDS):
        alone = Cluster(1, engine, TrainerCost())
        loads = [load_factor(run, clock) for run in runs]
        works = [
            simulate(groups, slower(alone, load), replace(schedule_of(run.config), groups_per_step=len(groups))).work
            for run, load in zip(runs, loads, strict=True)
            for groups, _ in zip(run.steps, run.profiles, strict=False)
        ]
        step, sequence = _fit(
            [work.batches for work in works], [work.tokens for work in works], seconds(Part.GENERATION, Part.SAMPLING)
        )
        first, token = _fit([work.passes for work in works], [work.new_tokens for work in works], seconds(Part.PREFILL))
        request = sum(seconds(*around)) / sum(work.requests for work in works)
        engine = EngineCost(step, sequence, prefill_pass=first, prefill_token=token, request=request, rows=rows)
    return Cluster(1, engine, trainer, is_shared=True)


def load_factor(run: RecordedRun, clock: Clock) -> float:
    """Return the factor that turns a time measured with ``clock`` into the wall time of the recorded run.

    Other programs can slow down a run. CPU times do not contain this delay. So the factor for the clock "cpu" is wall
    time / CPU time of the forward and backward passes, at least 1. For the clock "wall", the factor is 1.
    """
    if clock == "wall":
        return 1.0
    computing = (Part.FORWARD, Part.BACKWARD)
    wall, cpu = (
        sum(_seconds(profile, part, kind) for profile in run.profiles for part in computing) for kind in ("wall", "cpu")
    )
    return max(1.0, wall / cpu) if cpu else 1.0


def slower(cluster: Cluster, factor: float) -> Cluster:
    engine, trainer = cluster.engine, cluster.trainer
    seconds = ("step", "sequence", "weights", "context", "prefill_pass", "prefill_token", "request")
    return replace(
        cluster,
        engine=replace(engine, **{name: factor * value for name, value in asdict(engine).items() if name in seconds}),
        trainer=TrainerCost(factor * trainer.update, factor * trainer.token, factor * trainer.publish),
    )


def _fit(first: Sequence[float], second: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    ff, ss = _dot(first, first), _dot(second, second)
    fs, fy, sy = _dot(first, second), _dot(first, seconds), _dot(second, seconds)
    determinant = ff * ss - fs * fs
    if determinant > 1e-9 * ff * ss:
        a, b = (fy * ss - sy * fs) / determinant, (sy * ff - fy * fs) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # one of the two costs is 0: keep the cost that explains more
    of_first, of_second = fy / ff if ff else 0.0, sy / ss if ss else 0.0
    return (of_first, 0.0) if of_first * fy >= of_second * sy else (0.0, of_second)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(map(mul, left, right))


def _seconds(profile: StepProfile, part: Part, clock: Clock) -> float:
    time = profile.parts.get(part, PartTime())
    return time.seconds if clock == "wall" else time.cpu_seconds


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The numbers that determine the costs of a model on a GPU.

    Attributes:
        weights: the number of weights.
        served_bytes: the bytes of one weight in the engine.
        kv_bytes: the bytes of the keys and values of one token.
        passes: the computation of one update, divided by the computation of one forward pass over the same tokens. See
            :func:`agent_r1.training.plan.model_size`.
    """

    weights: int
    served_bytes: int
    kv_bytes: int
    passes: float


def engine_on(gpu: Gpu, size: ModelSize, gpus: int, slots: int, kv_tokens: float) -> EngineCost:
    """Return the costs of an engine on ``gpus`` GPUs.

    The GPUs count as one GPU with ``gpus`` times the bandwidth and FLOP/s. A decode step reads all weights, keys and
    values once, and computes 2 FLOPs per weight and sequence. See :class:`EngineCost` for ``slots`` and ``kv_tokens``.
    """
    flops, bandwidth = gpu.tflops * 1e12 * gpus, gpu.bandwidth * 1e9 * BANDWIDTH_SHARE * gpus
    return EngineCost(
        step=STEP_SECONDS,
        sequence=2 * size.weights / (flops * PREFILL_SHARE),
        weights=size.weights * size.served_bytes / bandwidth,
        context=size.kv_bytes / bandwidth,
        prefill_token=2 * size.weights / (flops * PREFILL_SHARE),
        slots=slots,
        kv_tokens=kv_tokens,
    )


def trainer_on(gpu: Gpu, size: ModelSize, gpus: int, mfu: float) -> TrainerCost:
    """Return the costs of a trainer on ``gpus`` GPUs. Each GPU reaches the share ``mfu`` of its peak FLOP/s."""
    flops = gpu.tflops * 1e12 * gpus * mfu
    return TrainerCost(
        token=2 * size.weights * size.passes / flops,
        publish=size.weights * size.served_bytes / PUBLISH_BYTES_PER_SECOND,
    )
