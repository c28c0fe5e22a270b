"""Controls for the demo: several seeds, several algorithms, and training on shuffled rewards.

    make controls                                     every run (about ten minutes)
    python benchmarks/controls.py --only grpo-1       one run

Each run starts from tiny-base and differs from ``agent-r1 train`` only in its algorithm, seed or shuffled rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_r1.config import Layer, resolve
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Scorer, Scores, Trajectory
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.tasksets import build
from agent_r1.training.build import rollout_limits
from agent_r1.training.config import TrainConfig
from agent_r1.training.evaluate import Method, evaluate_split
from agent_r1.training.policy import load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from agent_r1.training.tables import TrainReport


@dataclass(frozen=True, slots=True)
class ShuffledScorer:
    """A scorer that shuffles the rewards among the attempts at a task, so that nothing can be learned from them."""

    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Scores, ...]:
        rewards = list(await self.scorer.score(group, task))
        if group:
            random.Random(str(group[0].attempt.sort_key) + task.id).shuffle(rewards)
        return tuple(rewards)


@dataclass(frozen=True, slots=True)
class ControlRun:
    """One run: an algorithm, a seed, and whether its training rewards are shuffled."""

    algorithm: str
    seed: int
    shuffled: bool = False

    @property
    def name(self) -> str:
        return f"{'shuffled-' if self.shuffled else ''}{self.algorithm}-{self.seed}"

    def run(self) -> TrainReport:
        taskset = build("tinywiki", None, None, self.seed)
        with tempfile.TemporaryDirectory() as folder:
            wanted: dict[str, str | int] = {"algorithm": self.algorithm, "seed": self.seed}
            wanted["run"] = str(Path(folder) / "run")
            if self.shuffled:  # choosing the best checkpoint by true answers would be learning by selection
                wanted["evaluate_every"] = 0
            config = resolve(TrainConfig, [Layer("controls", wanted), Layer("recipe of tinywiki", taskset.recipe)])
            return train(config, with_shuffled_rewards(taskset) if self.shuffled else taskset, SilentProgress())


def with_shuffled_rewards(taskset: TaskSet) -> TaskSet:
    """Return the task set with rewards shuffled within groups; single attempts, as in evaluation, keep theirs."""
    return replace(taskset, scorers=tuple(ShuffledScorer(scorer) for scorer in taskset.scorers))


RUNS = [
    *(ControlRun("grpo", seed) for seed in (0, 1, 2)),
    *(ControlRun(name, 0) for name in ("ppo", "rloo", "reinforce++")),
    ControlRun("grpo", 0, shuffled=True),
]


def table_row(run: ControlRun, report: TrainReport) -> list[str]:
    cells = report.table.cells
    ems = {method: [f"{cell.em:.2f}" for cell in row.values()] for method, row in cells.items()}
    return [run.name, f"{report.train_seconds:.0f}", *(" ".join(values) for values in ems.values()), _passes(report)]


def _passes(report: TrainReport) -> str:
    shares: Mapping[str, float] = report.pass_at_k.shares if report.pass_at_k else {}
    return " ".join(f"{share:.2f}" for share in shares.values())


def one_hop(count: int = 200) -> float:
    """Return the exact match of naive RAG with tiny-base on one-hop questions, which one page answers."""
    taskset = build("tinywiki", None, None, 0)
    config = resolve(TrainConfig, [Layer("recipe of tinywiki", taskset.recipe)])
    policy = load_policy(config, taskset)
    agent = policy.agent(TorchEngine(policy.model, policy.context_length), config, 1.0)
    method = Method("naive-rag", agent, taskset.baselines["naive-rag"])
    answers = asyncio.run(evaluate_split(method, taskset, "one-hop", count, rollout_limits(config)))
    return statistics.fmean(answer.em for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[run.name for run in RUNS])
    wanted = parser.parse_args().only
    console = Console(width=140)
    console.print(f"naive-rag on 200 one-hop questions: {one_hop():.3f}")
    table = Table(
        "run", "train s", "naive-rag", "base-tool-call", "trained", "base pass@16", title="EM by split, in order"
    )
    for run in RUNS:
        if wanted in (None, run.name):
            table.add_row(*table_row(run, run.run()))
            console.print(table)


if __name__ == "__main__":
    main()
