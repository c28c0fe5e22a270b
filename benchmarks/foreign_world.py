"""Somebody else's world is learned by the same trainer: a dataset of reasoning-gym, from a tiny model that guesses.

    python benchmarks/foreign_world.py                    three seeds, each also with shuffled rewards
    python benchmarks/foreign_world.py --seeds 0 --steps 160

The questions are those of examples/alice.py. They hold two numbers, of brothers and sisters or of male and female
friends; the answer is one of these, and one more. In one wording of three it is the first number, in two the last. The
model is made first: it imitates a speaker that takes either number at random, and by another throw leaves it, adds one
or takes one away. So it can read a number; which one is asked for, and what becomes of it, the rewards have to teach.

Scores are reasoning-gym's own, over held-out questions, one answer to each, sampled at temperature 1, before and after
training. The pairs of numbers in them were neither trained on nor imitated. Rules that do not read the wording, and a
table of the training questions, show what can be had without. Under shuffled rewards, dealt at random among the
attempts at a question, there is nothing to be learned. "Female friends first" is a wording that the dataset lacks: it
shows what the trained model makes of a sentence that it was never paid for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from agent_r1.config import Layer
from agent_r1.core.messages import Message
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.trajectory import Rewards, Scorer, Trajectory
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.training.build import rollout_limits
from agent_r1.training.policy import load_policy
from agent_r1.training.checkpoint.files import find_trained_model
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.eval_metrics import score_trajectory
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.progress import SilentProgress
from agent_r1.training.tables import wilson_interval
from agent_r1.training.run import train
from agent_r1.training.user_task import load_task_file
from research.tiny_base.for_env import conversations, tiny_base_for

FILE = Path(__file__).parents[1] / "examples" / "alice.py"
BASE_STEPS, BASE_RATE = 400, 2e-3
"""Steps of imitation and their learning rate. The form takes 100; to take the numbers from the question takes more."""

SETTINGS = {
    "groups_per_step": 32,
    "group_size": 8,
    "max_tokens": 8,
    "context": 256,
    "trainer.learning_rate": 1e-3,
    "algorithm.kl.coefficient": 0.05,
    "checkpoint_every": 0,
    "evaluate_n": 1,
}
"""What tiny models are trained with. The divergence holds what rewards do not teach: without it, a run on shuffled ones
lost the form."""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Deals what the attempts at a task earned out among them at random: nothing can be learned from that."""

    scorer: Scorer

    async def score(self, group: Sequence[Trajectory], task: Task) -> tuple[Rewards, ...]:
        rewards = list(await self.scorer.score(group, task))
        if group:
            random.Random(str(group[0].attempt.sort_key) + task.id).shuffle(rewards)
        return tuple(rewards)


@dataclass(frozen=True, slots=True)
class Row:
    """A seed: scores of the same held-out questions before and after training, and after it on shuffled rewards.

    ``reworded`` are scores after training, of questions that are worded as none of training was. Seconds are those of
    making the base, and of training on the rewards as they are.
    """

    wordings: Sequence[str]
    before: Sequence[float]
    after: Sequence[float]
    shuffled: Sequence[float]
    reworded: Sequence[float]
    base_seconds: float
    train_seconds: float

    def cells(self) -> list[str]:
        by_wording = [f"{share:.2f}" for share in by_name(self.wordings, self.after).values()]
        seconds = (f"{self.base_seconds:.0f}", f"{self.train_seconds:.0f}")
        told = [_told(self.before), _told(self.after), *by_wording]
        return [*told, f"{statistics.fmean(self.reworded):.2f}", _told(self.shuffled), *seconds]


def by_name(names: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """The mean score under each name, in the order of the names."""
    pairs = list(zip(names, scores, strict=True))
    return {name: statistics.fmean(score for each, score in pairs if each == name) for name in sorted(set(names))}


def _told(scores: Sequence[float]) -> str:
    share = statistics.fmean(scores)
    low, high = wilson_interval(share, len(scores))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"


def guess(question: str, draws: random.Random) -> str:
    """A number of the question, or one beside it: the form of an answer, and no idea which is right."""
    return f"<answer>{int(draws.choice(_numbers(question))) + draws.choice((-1, 0, 1))}</answer>"


def blind_rules(known: Sequence[Task], asked: Sequence[Task]) -> dict[str, float]:
    """The share of the tasks asked that is answered by a rule which does not read how they are worded.

    The last knows the answers of the tasks known, whose questions it compares but for the names.
    """
    gold = [_gold(task) for task in asked]
    (_, constant), *_ = Counter(gold).most_common()
    table = {nameless(_question(task)): _gold(task) for task in known}

    def share(rule: Callable[[str], str]) -> float:
        said = [rule(_question(task)) for task in asked]
        return statistics.fmean(answer == right for answer, right in zip(said, gold, strict=True))

    return {
        "best constant answer": constant / len(gold),
        "first number and one": share(lambda question: _and_one(_numbers(question)[0])),
        "last number and one": share(lambda question: _and_one(_numbers(question)[-1])),
        "greatest number and one": share(lambda question: _and_one(max(_numbers(question), key=int))),
        "by topic": share(by_topic),
        "table of training, else by topic": share(lambda question: table.get(nameless(question), by_topic(question))),
    }


def by_topic(question: str) -> str:
    """Of friends the last number and one, of siblings the first: right in two wordings of three."""
    return _and_one(_numbers(question)[-1 if "friends" in question else 0])


def nameless(question: str) -> str:
    """The question without its words in capitals, so that questions which differ in names are one."""
    return re.sub(r"\b[A-Z][a-z]+\b", "_", question)


def _question(task: Task) -> str:
    return str(task.data["entry"]["question"])


def _gold(task: Task) -> str:
    return str(task.data["entry"]["answer"])


def _and_one(number: str) -> str:
    return str(int(number) + 1)


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def reworded(tasks: Sequence[Task]) -> list[Task]:
    """Those of friends, with the female ones first: the dataset has no such wording, and the first number is asked for.

    Who has learned that friends mean the last number fails here; who looks for the word beside the number does not.
    """
    return [_reworded(task) for task in tasks if " male friends and " in _question(task)]


def _reworded(task: Task) -> Task:
    swapped = {"male friends and": "female friends and", "female friends. They": "male friends. They"}
    question = re.sub("|".join(swapped), lambda found: swapped[found[0]], _question(task))
    entry = {**task.data["entry"], "question": question, "answer": _and_one(_numbers(question)[0])}
    messages = (*task.messages[:-1], Message.user(question))
    return replace(task, messages=messages, data={**task.data, "entry": entry, "wording": "reworded"})


def run(taskset: TaskSet, seed: int, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        began = time.perf_counter()
        make_base(taskset, base, seed)
        seconds = time.perf_counter() - began
        settings = {**SETTINGS, "model": str(base), "seed": seed, "steps": steps}
        config = resolve_config(TrainConfig, [Layer("foreign world", settings)], taskset)
        learned, took = trained(config, taskset, Path(folder) / "learned")
        control, _ = trained(config, with_shuffled_rewards(taskset), Path(folder) / "control")
        asked = taskset.tasks("test")
        three = [scores(config, taskset, asked), scores(learned, taskset, asked), scores(control, taskset, asked)]
        return Row(wordings(taskset), *three, scores(learned, taskset, reworded(asked)), seconds, took)


def wordings(taskset: TaskSet) -> list[str]:
    """Of the held-out questions."""
    return [task.data["wording"] for task in taskset.tasks("test")]


def with_shuffled_rewards(taskset: TaskSet) -> TaskSet:
    return replace(taskset, scorers=tuple(map(Shuffled, taskset.scorers)))


def trained(config: TrainConfig, taskset: TaskSet, folder: Path) -> tuple[TrainConfig, float]:
    """The configuration with the model that training in the world made, and the seconds of training."""
    report = train(config.model_copy(update={"run": str(folder)}), taskset, SilentProgress())
    return config.model_copy(update={"model": str(find_trained_model(report.run))}), report.train_seconds


def make_base(taskset: TaskSet, folder: Path, seed: int) -> None:
    draws = random.Random(seed)
    heard = conversations(taskset.env, taskset.tasks("train"), lambda prompt: guess(prompt, draws))
    tiny_base_for(heard, map(str, range(10)), folder, seed, BASE_STEPS, learning_rate=BASE_RATE)


def scores(config: TrainConfig, taskset: TaskSet, tasks: Sequence[Task]) -> list[float]:
    """One sampled attempt at each task."""
    return asyncio.run(_scores(config, taskset, tasks))


async def _scores(config: TrainConfig, taskset: TaskSet, tasks: Sequence[Task]) -> list[float]:
    policy = load_policy(config, taskset)
    engine = TorchEngine(policy.model, policy.context_length)
    method = Method("sampled", policy.agent(engine, config, 1.0), taskset.env)
    groups = await attempts(method, taskset.scorers, tasks, 1, rollout_limits(config))
    await engine.close()
    return [score_trajectory(group.trajectories[0]).em for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="of training, on the rewards and on shuffled ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    taskset = load_task_file(FILE, "a folder")
    rules = blind_rules(taskset.tasks("train"), taskset.tasks("test"))
    blind = ", ".join(f"{name} {share:.2f}" for name, share in rules.items())
    title, caption = "mean score over held-out questions (95 %)", f"without reading the wording: {blind}"
    by_wording = (*sorted(set(wordings(taskset))), "female friends first")
    columns = ("seed", "before", "after", *by_wording, "after, shuffled rewards", "base s", "train s")
    table = Table(*columns, title=title, caption=caption)
    for seed in options.seeds:
        table.add_row(str(seed), *run(taskset, seed, options.steps).cells())
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
