"""Forced searches: what a model reaches untrained, if decoding chooses for it when to search and when to answer.

    python benchmarks/forced_search.py --config recipes/people.toml
    python benchmarks/forced_search.py --config recipes/wikifilm.toml --model smollm2-135m --splits 1-hop 2-hop

A row forces k searches and then an answer: each action begins with the tokens of <search> or <answer>, and the model
writes the rest. It says how much of a trained agent's gain is the decision when to search. The model must use the tool
format "tags", and the task set must have a tool named search.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console

from agent_r1.config import Layer, read_toml, restrict, settings_of
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    PolicyVersionSpan,
    Prompt,
    SamplingParams,
    StopCondition,
    WeightUpdate,
)
from agent_r1.core.taskset import TaskSet
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.tasksets import build
from agent_r1.training.build import rollout_limits
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.evaluate import Method, make_table
from agent_r1.training.policy import load_policy
from agent_r1.training.progress import make_progress
from agent_r1.training.tables import render_table


@dataclass(frozen=True, slots=True)
class ForcedEngine:
    """An engine that begins the first ``searches`` completions of a session with ``search``, others with ``answer``.

    The forced tokens have log-probability 0, because nothing chose them.
    """

    engine: InferenceEngine
    searches: int
    search: tuple[int, ...]
    answer: tuple[int, ...]
    calls: Counter[str | None] = field(default_factory=Counter)

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        opening = self.search if self.calls[session_id] < self.searches else self.answer
        self.calls[session_id] += 1
        forced = Prompt((*prompt.token_ids, *opening))
        rest = replace(params, max_tokens=max(1, params.max_tokens - len(opening)))
        if params.stop_condition is not None:
            rest = replace(rest, stop_condition=_after(opening, params.stop_condition))
        completion = await self.engine.generate(forced, rest, session_id=session_id)
        return replace(
            completion,
            token_ids=(*opening, *completion.token_ids),
            logprobs=(*(0.0 for _ in opening), *completion.logprobs),
            version_spans=(PolicyVersionSpan(0, completion.version_spans[0].version),),
        )

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        return await self.engine.update_weights(update)

    async def release(self, session_id: str) -> None:
        del self.calls[session_id]
        await self.engine.release(session_id)

    async def close(self) -> None:
        await self.engine.close()


def _after(opening: tuple[int, ...], stop: StopCondition) -> StopCondition:
    return StopCondition(stop.strings, lambda token_ids: stop.is_met((*opening, *token_ids)))


async def measure(config: EvalConfig, taskset: TaskSet, searches: Sequence[int]) -> None:
    policy = load_policy(config, taskset, config.engine.dtype)
    engine = TorchEngine(policy.model, policy.context_length, config.engine)
    search, answer = (
        tuple(policy.tokenizer.encode(f"<{tag}>", add_special_tokens=False)) for tag in ("search", "answer")
    )
    console, methods = Console(width=120), []
    for count in searches:
        agent = policy.agent(ForcedEngine(engine, count, search, answer), config, 0.0)
        methods.append(Method(f"{count} forced searches", agent, taskset.env))
    try:
        table = await make_table(methods, taskset, config.n, rollout_limits(config), make_progress(console))
    finally:
        await engine.close()
    console.print(render_table(table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="settings of a training run or an evaluation")
    parser.add_argument("--model", help="model instead of the one in --config")
    parser.add_argument("--splits", nargs="+", help="splits of questions; without: the evaluation splits")
    parser.add_argument("--searches", type=int, nargs="+", default=[1, 2, 3], help="forced searches of each row")
    parser.add_argument("--n", type=int, default=200, help="questions per split")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except AgentR1Error as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def run(arguments: argparse.Namespace) -> None:
    """Print the table for the options of the command line."""
    given = {"n": arguments.n, "model": arguments.model, "splits": arguments.splits}
    options = Layer("options", {name: value for name, value in given.items() if value is not None})
    layers = [options, restrict(read_toml(arguments.config), EvalConfig, TrainConfig)]
    settings = settings_of(EvalConfig, layers)
    data = settings.get("data")
    taskset = build(settings["taskset"], Path(data) if data else None, settings.get("corpus"), settings.get("seed", 0))
    config = resolve_config(EvalConfig, layers, taskset)
    taskset = replace(taskset, evaluation=config.splits or taskset.evaluation)
    torch.set_num_threads(config.threads)
    asyncio.run(measure(config, taskset, arguments.searches))


if __name__ == "__main__":
    main()
