"""Somebody else's world is learned by the same trainer: Blackjack of TextArena, from a tiny model that acts at random.

    python benchmarks/foreign_world.py                    three seeds, with and without shuffled rewards
    python benchmarks/foreign_world.py --seeds 0 --shuffled

The model is made first: it imitates a speaker that says [Hit] or [Stand] by the toss of a coin, so it has the form and
no idea of the game. Returns are those of TextArena (1 for a hand that is won, else 0), over held-out hands, sampled at
temperature 1 before and after training. Under shuffled rewards, dealt at random among the attempts at a hand, nothing
can be learned, but a policy of a single choice drifts: compare all runs of a kind. The gain is that of each hand,
before against after; its interval says that a policy changed on these hands, not that rewards changed it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from agent_r1.config import Layer
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Rewards, RewardValue, Scorer, Trajectory
from agent_r1.core.world import World
from agent_r1.rollout.torch_engine import TorchEngine
from agent_r1.train.checkpoint import trained_model
from agent_r1.train.config import TrainConfig, settle
from agent_r1.train.custom import load_world
from agent_r1.train.evaluate import Method, attempts
from agent_r1.train.prepare import limits_of, open_policy
from agent_r1.train.report import Silence, wilson
from agent_r1.train.run import train
from agent_r1.train.scores import answered
from agent_r1.train.tiny_base.elsewhere import conversations, tiny_base_for

FILE = Path(__file__).parents[1] / "examples" / "blackjack.py"
HEARD = 200
"""Hands that the base model heard played."""

SETTINGS = {
    "steps": 30,
    "groups_per_step": 16,
    "group_size": 16,
    "max_tokens": 8,
    "context": 512,
    "learner.learning_rate": 5e-4,
    "learner.micro_tokens": 4096,
    "checkpoint_every": 0,
    "evaluate_n": 1,
}
"""What tiny models are trained with."""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Deals what the attempts at a task earned out among them at random: nothing can be learned from that."""

    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        rewards = [{name: _whole(value) for name, value in one.items()} for one in await self.scorer.score(group, task)]
        if group:
            random.Random(str(group[0].attempt.order) + task.id).shuffle(rewards)
        return tuple(rewards)


def _whole(value: RewardValue) -> float | None:
    """A reward per turn adds up; turns differ in number between attempts."""
    return sum(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Row:
    """One run: returns of the same held-out hands before and after, and how long the base and the training took."""

    before: Sequence[float]
    after: Sequence[float]
    base_seconds: float
    train_seconds: float

    def cells(self) -> list[str]:
        gains = [after - before for before, after in zip(self.before, self.after, strict=True)]
        seconds = (f"{self.base_seconds:.0f}", f"{self.train_seconds:.0f}")
        return [_told(self.before), _told(self.after), _gained(gains), *seconds]


def _told(returns: Sequence[float]) -> str:
    share = statistics.fmean(returns)
    low, high = wilson(share, len(returns))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"


def _gained(gains: Sequence[float]) -> str:
    """The mean over hands of what each gained: hands differ more than policies do, and in a difference they cancel."""
    mean = statistics.fmean(gains)
    margin = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains))
    return f"{mean:+.2f} ({mean - margin:+.2f} to {mean + margin:+.2f})"


def run(seed: int, shuffled: bool) -> Row:
    world = load_world(FILE, "a folder")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        began = time.perf_counter()
        make_base(world, base, seed)
        seconds = time.perf_counter() - began
        settings = {**SETTINGS, "model": str(base), "seed": seed, "run": str(Path(folder) / "run")}
        config = settle(TrainConfig, [Layer("foreign world", settings)], world)
        trained_in = replace(world, scorers=tuple(map(Shuffled, world.scorers))) if shuffled else world
        report = train(config, trained_in, Silence())
        after = returns(config.model_copy(update={"model": str(trained_model(report.run))}), world)
        return Row(returns(config, world), after, seconds, report.train_seconds)


def make_base(world: World, folder: Path, seed: int) -> None:
    coin = random.Random(seed)
    heard = conversations(world.env, world.tasks("train")[:HEARD], lambda prompt: coin.choice(("[Hit]", "[Stand]")))
    tiny_base_for(heard, map(str, range(32)), folder, seed)


def returns(config: TrainConfig, world: World) -> list[float]:
    """One sampled attempt at each held-out hand."""
    return asyncio.run(_returns(config, world))


async def _returns(config: TrainConfig, world: World) -> list[float]:
    policy = open_policy(config, world)
    engine = TorchEngine(policy.model, policy.context)
    method = Method("sampled", policy.agent(engine, config, 1.0), world.env)
    groups = await attempts(method, world.scorers, world.tasks("test"), 1, limits_of(config))
    await engine.close()
    return [answered(group.trajectories[0]).em for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--shuffled", type=int, nargs="*", default=[0, 1, 2], help="seeds of runs on shuffled rewards")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "run",
        "before",
        "after",
        "gain, hand by hand",
        "base s",
        "train s",
        title="mean return over held-out hands (95 %)",
    )
    runs = [(seed, False) for seed in options.seeds] + [(seed, True) for seed in options.shuffled]
    for seed, shuffled in runs:
        name = f"seed {seed}{', shuffled' if shuffled else ''}"
        table.add_row(name, *run(seed, shuffled).cells())
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
