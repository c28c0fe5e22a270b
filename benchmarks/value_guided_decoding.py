"""Value-guided decoding against best-of-k by log-probability and the majority vote, at equal numbers of sampled tokens.

    agent-r1 train --algorithm ppo --steps 10 --checkpoint_every 1 --run runs/half
    python benchmarks/value_guided_decoding.py --run runs/half --critic runs/half
    agent-r1 train-critic --run runs/half --learning_rate 1e-3
    python benchmarks/value_guided_decoding.py --run runs/half --critic runs/half/critic --candidates 4 8

Attempts are sampled at temperature 1. Best-of-k takes the attempt with the largest mean log-probability, and the vote
the most common answer. k is the number of attempts that sample about as many tokens as a guided attempt, rounded to the
nearest number. The control "step by log pi" chooses actions by their mean log-probability, without a critic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agent_r1.config import Layer
from agent_r1.core.environment import Env
from agent_r1.core.inference import ScoredTokens, ValueFunction
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Trajectory
from agent_r1.inference.config import DecodeConfig
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rewards.scoring import final_answer
from agent_r1.rollout.agent_loop import Agent
from agent_r1.tasksets import build
from agent_r1.training.build import rollout_limits
from agent_r1.training.checkpoint_files import find_trained_model
from agent_r1.training.config import EvalConfig, resolve_config
from agent_r1.training.evaluate import Method, attempts, guided_method, with_temperature
from agent_r1.training.metrics import majority_score, mean_logprob, score_trajectory
from agent_r1.training.policy import load_policy, open_critic
from agent_r1.training.tables import normal_interval


class MeanLogprob:
    """A value function without a critic: the mean log-probability of the tokens of an action."""

    async def values(self, session_id: str, context: ScoredTokens, branches: Sequence[ScoredTokens]) -> list[float]:
        return [statistics.fmean(branch.logprobs or (0.0,)) for branch in branches]

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a method: exact match with its 95 % interval over n questions, and sampled tokens per question."""

    method: str
    em: float
    low: float
    high: float
    n: int
    tokens: float


def make_row(method: str, scores: Sequence[float], tokens: float) -> Row:
    row = Row(method, statistics.fmean(scores), *normal_interval(scores), len(scores), tokens)
    print(
        f"{row.method:38} {row.em:.3f} ({row.low:.3f}-{row.high:.3f})  n {row.n}  {row.tokens:6.1f} tokens", flush=True
    )
    return row


@dataclass(frozen=True, slots=True)
class Bench:
    """A half-trained agent, its engine, and the questions."""

    agent: Agent
    engine: TorchEngine
    model: PreTrainedModel
    taskset: TaskSet
    config: EvalConfig
    split: str

    @property
    def env(self) -> Env:
        return self.taskset.env_for_split(self.split)

    async def sample(self, method: Method, size: int) -> tuple[list[tuple[Trajectory, ...]], float]:
        """Return ``size`` attempts at each question, and the sampled tokens per question."""
        before, tasks = self.engine.num_generated_tokens, self.taskset.tasks(self.split)[: self.config.n]
        groups = await attempts(method, self.taskset.scorers, tasks, size, rollout_limits(self.config))
        tokens = (self.engine.num_generated_tokens - before) / len(tasks)
        return [group.trajectories for group in groups], tokens

    async def guided(self, name: str, values: ValueFunction, decode: DecodeConfig) -> Row:
        """Measure one guided attempt at each question."""
        questions, tokens = await self.sample(guided_method(self.agent, self.env, values, decode), 1)
        return make_row(name, [score_trajectory(attempt).em for (attempt,) in questions], tokens)


def best_of(questions: Sequence[Sequence[Trajectory]], k: int, tokens: float) -> list[Row]:
    """Return the rows of best-of-k by log-probability and of the majority vote, from the first k attempts."""
    likeliest, votes = [], []
    for sampled in questions:
        some = sampled[:k]
        em = [score_trajectory(attempt).em for attempt in some]
        likeliest.append(max(zip(map(mean_logprob, some), em, strict=True))[1])
        votes.append(majority_score([final_answer(attempt) for attempt in some], em))
    return [
        make_row(f"best of {k} by log-probability", likeliest, k * tokens),
        make_row(f"majority of {k}", votes, k * tokens),
    ]


async def measure(bench: Bench, critics: Sequence[str], arguments: argparse.Namespace) -> list[Row]:
    most = max(arguments.candidates)
    questions, total = await bench.sample(Method("plain", bench.agent, bench.env), 2 * most)
    one = total / (2 * most)
    rows = [make_row("plain", [score_trajectory(sampled[0]).em for sampled in questions], one)]
    rows.append(
        make_row("plain, mean of all", [statistics.fmean(score_trajectory(a).em for a in s) for s in questions], one)
    )
    greedy, tokens = await bench.sample(Method("greedy", with_temperature(bench.agent, 0.0), bench.env), 1)
    rows.append(make_row("greedy", [score_trajectory(attempt).em for (attempt,) in greedy], tokens))
    for count in arguments.candidates:
        guided: list[Row] = []
        for name in critics:
            for method in arguments.methods:
                decode = DecodeConfig(method=method, critic=name, candidates=count, beta=0.0)
                critic = open_critic(decode, bench.model)
                guided.append(await bench.guided(f"{method} {count}, {Path(name).name}", critic, decode))
        control = DecodeConfig(method="step", critic="none", candidates=count, beta=0.0)
        guided.append(await bench.guided(f"step {count} by log pi", MeanLogprob(), control))
        rows += guided
        for k in sorted({min(max(round(row.tokens / one), 1), 2 * most) for row in guided}):
            rows += best_of(questions, k, one)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run of the half-trained agent")
    parser.add_argument("--critic", nargs="+", required=True, help="critics: folders, or runs with a critic")
    parser.add_argument("--candidates", type=int, nargs="+", default=[4, 8], help="candidates of a guided attempt")
    parser.add_argument("--methods", nargs="+", default=["step", "beam"], help="methods")
    parser.add_argument("--split", default="style-b", help="split of the questions")
    parser.add_argument("--n", type=int, default=200, help="questions")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--out", type=Path, help="file for the rows as JSON")
    arguments = parser.parse_args()
    taskset = build("tinywiki", None, None, 0)
    settings = {"model": str(find_trained_model(arguments.run)), "n": arguments.n, "seed": arguments.seed}
    config = resolve_config(EvalConfig, [Layer("options", settings)], taskset)
    torch.set_num_threads(config.threads)
    policy = load_policy(config, taskset, config.engine.dtype)
    engine = TorchEngine(policy.model, policy.context_length, config.engine)
    bench = Bench(policy.agent(engine, config, 1.0), engine, policy.model, taskset, config, arguments.split)
    rows = asyncio.run(measure(bench, arguments.critic, arguments))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
