"""Controls for the demo: what simpler methods reach, other seeds, and training on shuffled rewards.

    make controls                            every row (about fifteen minutes)
    python benchmarks/controls.py --only untrained logit-bias grpo-1
    python benchmarks/controls.py --only untrained grpo-0 --model BASE    the base of another seed, as a folder

Every row starts from tiny-base, or from ``--model``. All are measured on the same test questions, greedily and sampled
at temperature 1.
The rows logit-bias train nothing. The first adds one number to the logit of the token that begins an answer; the second
also to those that begin a call and end an action. The numbers are chosen on the validation encyclopedia, as the
checkpoints of the other rows are, for greedy decoding. The row told-hops searches as often as the question has hops.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedTokenizerBase

from agent_r1.config import Layer, resolve
from agent_r1.core.errors import EngineError
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersion,
    Prompt,
    SamplingParams,
    WeightUpdate,
)
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.tasksets import build
from agent_r1.tasksets.tinywiki import MAX_TURNS
from agent_r1.tasksets.tinywiki.model import TINY_BASE
from agent_r1.tasksets.tinywiki.search import NOTHING, retrieve
from agent_r1.tasksets.tinywiki.wiki import RELATIONS, open_wiki
from agent_r1.tools.function_tool import tool
from agent_r1.training.build import rollout_limits
from agent_r1.training.config import TrainConfig
from agent_r1.training.evaluate import Method, attempts, evaluate_split, with_temperature
from agent_r1.training.metrics import score_trajectory
from agent_r1.training.policy import Policy, load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from agent_r1.training.tables import make_cell, normal_interval

ANSWER, CALL, END = "<answer>", "<tool_call>", "<|im_end|>"
"""The tokens that decide how an action goes on: they begin an answer, begin a call, and end the action."""

NEVER = -100.0

BIASES = (0.0, *(sign * 0.5 * step for step in range(1, 7) for sign in (-1, 1)))
"""The numbers that are tried for a token, the weakest first."""

QUESTIONS = 200
SAMPLES = 4
"""Sampled attempts at each question; the interval is over questions, whose attempts are not independent."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Exact match on one split: greedy with its 95 % interval, and sampled with its own.

    Example:
        Measurement(greedy=0.95, greedy_interval=(0.92, 0.98), sampled=0.4, sampled_interval=(0.35, 0.45))
    """

    greedy: float
    greedy_interval: tuple[float, float]
    sampled: float
    sampled_interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A row that trains: an algorithm and a seed, shuffled rewards or true ones.

    ``selected`` keeps the weights that were best on validation, as ``agent-r1 train`` does; otherwise the last ones.
    """

    algorithm: str
    seed: int
    shuffled: bool = False
    selected: bool = True

    @property
    def name(self) -> str:
        name = f"{'shuffled-' if self.shuffled else ''}{self.algorithm}-{self.seed}"
        return name if self.selected else f"{name}-last"

    def rows(self, model: str) -> list[list[str]]:
        """Train ``model`` and measure it; the first run of grpo is measured with disturbed searches as well."""
        taskset = build("tinywiki", None, None, self.seed)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            wanted: dict[str, str | int | bool] = {
                "model": model,
                "algorithm": self.algorithm,
                "seed": self.seed,
                "run": str(run),
                "pass_k": 0,
                "shuffle_rewards": self.shuffled,
            }
            if not self.selected:
                wanted["evaluate_every"] = 0
            config = resolve(TrainConfig, [Layer("controls", wanted), Layer("recipe of tinywiki", taskset.recipe)])
            train(config, taskset, SilentProgress())
            trained = load(str(run / "model"))
            changed = DISTURBANCES if self == RUNS[0] else {}
            rows = [table_row(self.name, measure(trained))]
            return rows + [table_row(name, measure(disturb(trained, how))) for name, how in changed.items()]


def two_more_pages(query: str, task: Task) -> str:
    """Return the page and two others, in any order."""
    wiki, rng = open_wiki(task.data["wiki"]), random.Random(f"{task.id} {query}")
    pages = [retrieve(wiki, query), *map(wiki.page, rng.sample(wiki.titles, 2))]
    rng.shuffle(pages)
    return "\n".join(pages)


def a_quarter_empty(query: str, task: Task) -> str:
    """Return nothing for a quarter of the queries, the page for the others."""
    empty = random.Random(f"{task.id} {query}").random() < 0.25
    return NOTHING if empty else retrieve(open_wiki(task.data["wiki"]), query)


DISTURBANCES = {"grpo-0, two more pages in each result": two_more_pages, "grpo-0, a quarter empty": a_quarter_empty}

RUNS = [
    *(TrainingRun("grpo", seed) for seed in range(5)),
    *(TrainingRun(name, 0) for name in ("rft", "ppo", "rloo", "reinforce++")),
    TrainingRun("grpo", 0, selected=False),
    TrainingRun("grpo", 0, shuffled=True),
    TrainingRun("grpo", 0, shuffled=True, selected=False),
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can be measured on TinyWiki."""

    policy: Policy
    taskset: TaskSet
    config: TrainConfig

    def engine(self) -> InferenceEngine:
        return TorchEngine(deepcopy(self.policy.model), self.policy.context_length)  # it changes the attention

    def method(self, name: str = "base-tool-call") -> Method:
        agent = self.policy.agent(self.engine(), self.config, 1.0)
        return Method(name, agent, self.taskset.baselines.get(name, self.taskset.env))


def load(model: str = TINY_BASE) -> Loaded:
    taskset = build("tinywiki", None, None, 0)
    config = resolve(TrainConfig, [Layer("controls", {"model": model}), Layer("recipe of tinywiki", taskset.recipe)])
    return Loaded(load_policy(config, taskset), taskset, config)


def add_logit_biases(loaded: Loaded, biases: Mapping[str, float]) -> Loaded:
    """Return the model with a number added to the logit of each of the tokens."""
    model = deepcopy(loaded.policy.model)
    weight = model.get_output_embeddings().weight  # (V, H)
    head = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.zero_()
        for token, bias in biases.items():
            head.bias[loaded.policy.tokenizer.convert_tokens_to_ids(token)] = bias
    model.set_output_embeddings(head)
    return replace(loaded, policy=replace(loaded.policy, model=model))


@dataclass(frozen=True, slots=True)
class TellingEngine:
    """An engine that searches until the agent has as many pages as its question has hops, and then answers.

    ``searching`` cannot begin an answer, and ``answering`` cannot begin a call.
    """

    searching: InferenceEngine
    answering: InferenceEngine
    tokenizer: PreTrainedTokenizerBase

    @property
    def capabilities(self) -> Capabilities:
        return self.searching.capabilities

    async def generate(self, prompt: Prompt, params: SamplingParams, *, session_id: str | None = None) -> Completion:
        question, *observed = self.tokenizer.decode(prompt.token_ids).split("<|im_start|>assistant")
        hops = sum(word in RELATIONS for word in re.findall(r"\w+", question.rpartition("<|im_start|>user")[2]))
        pages = sum(text.count("<tool_response>") for text in observed)
        engine = self.searching if pages < hops else self.answering
        return await engine.generate(prompt, params, session_id=session_id)

    async def update_weights(self, update: WeightUpdate) -> PolicyVersion:
        raise EngineError("this engine serves an untrained model, which has no updates")

    async def release(self, session_id: str) -> None:
        await self.searching.release(session_id)
        await self.answering.release(session_id)

    async def close(self) -> None:
        await self.searching.close()
        await self.answering.close()


@dataclass(frozen=True, slots=True)
class ToldHops(Loaded):
    """A model that is told when to search and when to answer; what it reads and searches is its own choice."""

    def engine(self) -> InferenceEngine:
        without_answer, without_call = (add_logit_biases(self, {token: NEVER}) for token in (ANSWER, CALL))
        return TellingEngine(Loaded.engine(without_answer), Loaded.engine(without_call), self.policy.tokenizer)


def disturb(loaded: Loaded, how: Callable[[str, Task], str]) -> Loaded:
    """Return the same model with a search that returns something else than in training."""

    @tool
    def search(query: str, task: Task) -> str:
        """Find a page.

        Args:
            query: what to find
        """
        return how(query, task)

    return replace(loaded, taskset=replace(loaded.taskset, env=ToolEnv([search], max_turns=MAX_TURNS)))


def choose_biases(loaded: Loaded, tokens: Sequence[str]) -> dict[str, float]:
    """Return a number for each token, chosen one after the other by greedy exact match on the validation split.

    Of equal numbers, the weakest is chosen.
    """

    def validate(biases: Mapping[str, float]) -> float:
        biased = add_logit_biases(loaded, biases)
        limits = rollout_limits(biased.config)
        answers = evaluate_split(biased.method(), biased.taskset, "validation", biased.config.evaluate_n, limits)
        return statistics.fmean(answer.em for answer in asyncio.run(answers))

    chosen: dict[str, float] = {}
    for token in tokens:
        chosen[token] = max(BIASES, key=lambda bias: validate({**chosen, token: bias}))
    return chosen


def measure(loaded: Loaded, name: str = "base-tool-call") -> list[Measurement]:
    """Return the exact match of a model on each evaluation split of TinyWiki."""
    method, taskset, limits = loaded.method(name), loaded.taskset, rollout_limits(loaded.config)
    sampling = replace(method, agent=with_temperature(method.agent, 1.0))
    measured = []
    for split in taskset.evaluation:
        greedy = make_cell(asyncio.run(evaluate_split(method, taskset, split, QUESTIONS, limits)))
        tasks = taskset.tasks(split)[:QUESTIONS]
        groups = asyncio.run(attempts(sampling, taskset.scorers, tasks, SAMPLES, limits))
        means = [statistics.fmean(score_trajectory(one).em for one in group.trajectories) for group in groups]
        interval = (greedy.low, greedy.high)
        measured.append(Measurement(greedy.em, interval, statistics.fmean(means), normal_interval(means)))
    return measured


def table_row(name: str, measured: Sequence[Measurement]) -> list[str]:
    greedy = [f"{one.greedy:.2f} ({one.greedy_interval[0]:.2f}-{one.greedy_interval[1]:.2f})" for one in measured]
    sampled = [f"{one.sampled:.2f} ({one.sampled_interval[0]:.2f}-{one.sampled_interval[1]:.2f})" for one in measured]
    return [name, *greedy, *sampled]


def biased_row(untrained: Loaded, *tokens: str) -> list[list[str]]:
    chosen = choose_biases(untrained, tokens)
    name = "logit-bias " + ", ".join(f"{token} {bias:+.2f}" for token, bias in chosen.items())
    return [table_row(name, measure(add_logit_biases(untrained, chosen)))]


def rows_by_name(model: str) -> dict[str, Callable[[], list[list[str]]]]:
    """Return, for each name that ``--only`` takes, a function that computes the rows of the table."""
    untrained = load(model)
    return {
        "naive-rag": lambda: [table_row("naive-rag", measure(untrained, "naive-rag"))],
        "untrained": lambda: [table_row("untrained", measure(untrained))],
        "logit-bias": lambda: biased_row(untrained, ANSWER),
        "logit-biases": lambda: biased_row(untrained, ANSWER, CALL, END),
        "told-hops": lambda: [
            table_row("told-hops", measure(ToldHops(untrained.policy, untrained.taskset, untrained.config)))
        ],
        **{run.name: partial(run.rows, model) for run in RUNS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="the rows of the table; by default all")
    parser.add_argument("--model", default=TINY_BASE, help="the model from which every row starts")
    given = parser.parse_args()
    rows = rows_by_name(given.model)
    if unknown := set(given.only or ()) - rows.keys():
        parser.error(f"--only: no row {', '.join(sorted(unknown))}; give some of {', '.join(rows)}")
    splits = build("tinywiki", None, None, 0).evaluation
    columns = ("row", *(f"{split} greedy" for split in splits), *(f"{split} T=1" for split in splits))
    title = f"exact match, {QUESTIONS} questions a split, 95 % intervals; T = 1: {SAMPLES} attempts a question"
    console, table = Console(width=180), Table(*columns, title=title)
    for name in given.only or rows:
        for row in rows[name]():
            table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
