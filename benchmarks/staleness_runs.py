"""Measure how busy the embedded engine is if the durations of tools have a long tail, by staleness.

    python -m benchmarks.staleness_runs --folder runs/staleness

It trains a Llama of 2 million random weights. Engine and trainer compute in threads of their own, if there are two
cores. Each attempt has three turns of at most 150 tokens. After each turn but the last, the environment sleeps as long
as the tools of ``benchmarks/staleness.py`` take, with the same limit of 10 s, or not at all. On a CPU, a token costs
more to train on than to sample, so the algorithm trains on one attempt of each group of eight (rejection sampling).

Printed are, for each staleness, with and without slow tools:

- the load: by which factor other programs slowed the passes of the trainer (wall time divided by CPU time);
- the seconds of a step;
- the share of the time in which the engine had a request, as the run records it (``engine/utilization``), and the mean
  number of requests in this time (``engine/running``);
- the ideal: the seconds of a step of the run with instant tools and the largest staleness, whose engine is always busy,
  at the load of this run. It is given as a share of the seconds of a step;
- both numbers of seconds, as the simulation of ``benchmarks/staleness.py`` predicts them from the attempts of each run
  and its load. The costs of engine and trainer come from two runs with instant tools and staleness 0, one of them with
  one group per step.

The first steps are left out, and as many of the last ones as the largest staleness, because nothing is sampled ahead in
them. Runs that the folder already holds are not made again. Runs with other options are in other folders inside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.config import Layer
from agent_r1.core.environment import RolloutContext, Transition
from agent_r1.core.messages import Action, Message, ToolSpec
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.model.load import load_tokenizer
from agent_r1.rewards.scoring import FunctionScorer
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training import run
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.progress import SilentProgress
from agent_r1.training.simulation import Cluster, simulate
from agent_r1.training.step_costs import (
    RecordedRun,
    load_factor,
    measure_cluster,
    read_profiled_run,
    schedule_of,
    slower,
)
from benchmarks.staleness import GROUP_SIZE, TURNS, draw_seconds
from research.paper.intervals import Estimate, estimate

MAX_TOKENS, CONTEXT, TOOL_LIMIT = 150, 640, 10.0


@dataclass(slots=True)
class SlowTurns:
    """An environment of three turns. After each turn but the last, it sleeps at most ``limit`` seconds."""

    limit: float
    tools: tuple[ToolSpec, ...] = ()

    async def open(self, task: Task, context: RolloutContext) -> SlowEpisode:
        draw = random.Random(context.seed)
        seconds = [draw_seconds(draw, self.limit) for _ in range(TURNS - 1)]
        return SlowEpisode(task.messages, seconds)


@dataclass(slots=True)
class SlowEpisode:
    """An episode of :class:`SlowTurns`. ``seconds`` holds the durations of the sleeps that are left."""

    start: tuple[Message, ...]
    seconds: list[float]

    async def step(self, action: Action) -> Transition:
        if not self.seconds:
            return Transition((), end="terminal")
        await asyncio.sleep(self.seconds.pop())
        return Transition((Message.user("search"),))

    async def close(self) -> None:
        return None


def is_first(trajectory: Trajectory, task: Task) -> float:
    """Return 1.0 for the first attempt of each group, which is the only one to train on."""
    return float(trajectory.attempt.sample_index == 0)


def make_taskset(limit: float) -> TaskSet:
    """Return the questions of TinyWiki in an environment whose tools take at most ``limit`` seconds."""
    scorers = (FunctionScorer({"em": is_first}),)
    return replace(build("tinywiki", None, None, 0), env=SlowTurns(limit), scorers=scorers, baselines={}, variants={})


def make_model(folder: Path) -> Path:
    """Write a Llama of 2 million random weights, unless it exists, and return its folder."""
    if not folder.exists():
        tokenizer = load_tokenizer("tiny-base")
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=5,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=CONTEXT,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Measured:
    """A recorded run: its load, and the means over the measured steps.

    Attributes:
        load: the factor by which other programs slowed the run.
        seconds: the seconds of a step: the mean over cycles of steps, with its 95 % interval.
        busy: the share of the time in which the engine had a request.
        running: the number of requests in this time.
    """

    run: RecordedRun
    load: float
    seconds: Estimate
    busy: float
    running: float


def window(found: RecordedRun, ahead: int) -> range:
    """Return the steps that are measured, counted from 0. ``ahead`` is the largest staleness of all runs.

    With staleness n, the attempts of n + 1 steps are sampled side by side and end at about the same time: n short steps
    follow a long one. So the number of steps is a multiple of n + 1.
    """
    cycle, end = found.config["max_staleness"] + 1, len(found.steps) - ahead
    return range(end - (end - 1) // cycle * cycle, end)


def record(place: Path, model: Path, limit: float, groups: int, staleness: int, options: argparse.Namespace) -> None:
    """Train with ``groups`` groups per step, unless the folder ``place`` holds the run already."""
    if not place.exists():
        values: dict[str, Any] = {"steps": options.steps, "evaluate_every": 0, "evaluate_n": 1, "pass_k": 0}
        values |= {"splits": ("style-a",), "checkpoint_every": 0, "record_tokens": 0, "profile": options.steps}
        values |= {"groups_per_step": groups, "group_size": GROUP_SIZE, "max_staleness": staleness}
        unfinished = place.with_name(f"{place.name}, unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        values |= {"max_tokens": MAX_TOKENS, "context": CONTEXT, "model": str(model), "run": str(unfinished)}
        places = options.groups * GROUP_SIZE * (max(options.staleness) + 1)
        values |= {"concurrency": places, "engine.max_sequences": places, "engine.kv_cache_gib": 4.0}
        values |= {"algorithm": "rft", "algorithm.correction.level": "token", "seed": options.seed}
        values |= {"trainer.learning_rate": 1e-6}
        taskset = make_taskset(limit)
        run.train(resolve_config(TrainConfig, [Layer("benchmark", values)], taskset), taskset, SilentProgress())
        unfinished.rename(place)


def mean_step(laps: Sequence[float], cycle: int) -> Estimate:
    """Return the mean of ``laps``, the seconds of each step, with its 95 % interval over cycles of ``cycle`` steps."""
    return estimate([fmean(laps[first : first + cycle]) for first in range(0, len(laps), cycle)])


def runs_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the runs with these options. ``options.folder`` holds the folders of all options."""
    name = f"groups {options.groups}, steps {options.steps}, seed {options.seed}"
    return Path(options.folder, f"{name}, staleness at most {max(options.staleness)}")


def measure(place: Path, ahead: int) -> Measured:
    """Return the figures of the run in the folder ``place``. ``ahead`` is the largest staleness of all runs."""
    found = read_profiled_run(place)
    with closing(RunReader(place)) as reader:
        shares, running = reader.curve("engine/utilization"), reader.curve("engine/running")
    steps, cycle = window(found, ahead), found.config["max_staleness"] + 1
    laps = [found.profiles[n].total.seconds for n in steps]
    busy = [shares[n + 1] * lap for n, lap in zip(steps, laps, strict=True)]
    requests = sum(running[n + 1] * seconds for n, seconds in zip(steps, busy, strict=True)) / sum(busy)
    return Measured(found, load_factor(found, "cpu"), mean_step(laps, cycle), sum(busy) / sum(laps), requests)


def predict(found: RecordedRun, cluster: Cluster, ahead: int) -> float:
    """Return the seconds of a step that the simulation predicts for a run."""
    ends, steps = simulate(found.groups, cluster, schedule_of(found.config)).step_ends, window(found, ahead)
    return (ends[steps[-1]] - ends[steps[0] - 1]) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"), help="where the runs are")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ahead = max(options.staleness)
    if options.steps < 3 * (ahead + 1):
        parser.error(f"--steps {options.steps}: give at least {3 * (ahead + 1)}, two cycles besides the steps left out")
    model = make_model(options.folder / "model")
    runs_of_options = runs_folder(options)
    small = runs_of_options / "instant, one group"
    record(small, model, 0.0, 1, 0, options)
    runs = {}
    for staleness in options.staleness:  # with and without slow tools in turn, because the machine's load changes
        for name, limit in (("instant", 0.0), ("slow", TOOL_LIMIT)):
            place = runs_of_options / f"{name} {staleness}"
            record(place, model, limit, options.groups, staleness, options)
            runs[name, staleness] = measure(place, ahead)
    known = [runs["instant", 0].run, read_profiled_run(small)]
    cluster = replace(measure_cluster(known, "cpu"), is_shared=len(os.sched_getaffinity(0)) == 1)
    ideal = runs["instant", ahead]
    print("tools    staleness  load  seconds per step  engine busy  requests  ideal  predicted: seconds  ideal")
    for (name, staleness), found in sorted(runs.items()):
        loaded = slower(cluster, found.load)
        seconds, least = (predict(run, loaded, ahead) for run in (found.run, ideal.run))
        share = ideal.seconds.mean / ideal.load * found.load / found.seconds.mean
        print(
            f"{name:<9}{staleness:<11}{found.load:<6.2f}{f'{found.seconds.mean:.2f} +- {found.seconds.half:.2f}':<18}"
            f"{found.busy:<13.3f}{found.running:<10.1f}{share:<7.2f}{seconds:<20.2f}{least / seconds:.2f}"
        )


if __name__ == "__main__":
    main()
