"""Train a tiny model on a data set of another library: the family problems of reasoning-gym.

    python -m benchmarks.foreign_taskset                    three seeds, each also with shuffled rewards
    python -m benchmarks.foreign_taskset --seeds 0 --steps 160

The questions are those of examples/alice.py. Each has two numbers, of brothers and sisters or of male and female
friends; the answer is one of the two plus 1. In one of three wordings it is the first number, in two the last. The base
model is made first. It imitates random answers: one of the two numbers, plus 1, 0 or -1. So it can read a number from
the question; the rewards have to teach which number to take and what to add.

Scores are reasoning-gym's own, on held-out questions, one answer to each, sampled at temperature 1, before and after
training. Their pairs of numbers occur neither in training nor in the imitated conversations. Rules that do not read the
wording, and a table of the training questions, show which score is possible without reading. With rewards shuffled
among the attempts at a question nothing can be learned. "Female friends first" is a wording that the data set lacks: it
shows how the trained model answers a sentence for which it never got a reward.
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
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.training.build import rollout_limits
from agent_r1.training.checkpoint_files import find_trained_model
from agent_r1.training.config import TrainConfig, resolve_config
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.metrics import score_trajectory
from agent_r1.training.policy import load_policy
from agent_r1.training.progress import SilentProgress
from agent_r1.training.run import train
from agent_r1.training.tables import wilson_interval
from agent_r1.training.user_task import load_task_file
from research.tiny_base.for_env import make_tiny_base, record_conversations

FILE = Path(__file__).parents[1] / "examples" / "alice.py"
BASE_STEPS, BASE_RATE = 400, 2e-3
"""Steps of imitation and their learning rate. The format takes 100 steps; copying numbers takes more."""

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
"""Settings for tiny models. Without the KL penalty, a run with shuffled rewards lost the answer format."""


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The scores of one seed on the same held-out questions: before training, after it, and after shuffled rewards.

    ``reworded`` are scores after training on a wording that does not occur in training. The seconds are those of making
    the base model and of training with true rewards.
    """

    wordings: Sequence[str]
    before: Sequence[float]
    after: Sequence[float]
    shuffled: Sequence[float]
    reworded: Sequence[float]
    base_seconds: float
    train_seconds: float

    def cells(self) -> list[str]:
        by_wording = [f"{share:.2f}" for share in mean_by_name(self.wordings, self.after).values()]
        seconds = (f"{self.base_seconds:.0f}", f"{self.train_seconds:.0f}")
        scores = [_with_interval(self.before), _with_interval(self.after), *by_wording]
        return [*scores, f"{statistics.fmean(self.reworded):.2f}", _with_interval(self.shuffled), *seconds]


def mean_by_name(names: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Return the mean score of each name, sorted by name."""
    pairs = list(zip(names, scores, strict=True))
    return {name: statistics.fmean(score for each, score in pairs if each == name) for name in sorted(set(names))}


def _with_interval(scores: Sequence[float]) -> str:
    share = statistics.fmean(scores)
    low, high = wilson_interval(share, len(scores))
    return f"{share:.2f} ({low:.2f}-{high:.2f})"


def guess(question: str, draws: random.Random) -> str:
    """Return a random answer: one of the numbers in the question, plus 1, 0 or -1."""
    return f"<answer>{int(draws.choice(_numbers(question))) + draws.choice((-1, 0, 1))}</answer>"


def blind_rules(known: Sequence[Task], tested: Sequence[Task]) -> dict[str, float]:
    """Return the share of the tested tasks that each rule answers; no rule reads the wording.

    The last rule looks up the answers of the known tasks; it compares questions without names.
    """
    gold = [_gold(task) for task in tested]
    (_, constant), *_ = Counter(gold).most_common()
    table = {nameless(_question(task)): _gold(task) for task in known}

    def share(rule: Callable[[str], str]) -> float:
        answers = [rule(_question(task)) for task in tested]
        return statistics.fmean(answer == right for answer, right in zip(answers, gold, strict=True))

    return {
        "best constant answer": constant / len(gold),
        "first number and one": share(lambda question: _plus_one(_numbers(question)[0])),
        "last number and one": share(lambda question: _plus_one(_numbers(question)[-1])),
        "greatest number and one": share(lambda question: _plus_one(max(_numbers(question), key=int))),
        "by topic": share(by_topic),
        "table of training, else by topic": share(lambda question: table.get(nameless(question), by_topic(question))),
    }


def by_topic(question: str) -> str:
    """Return the last number plus 1 for friends, the first plus 1 for siblings: right in two of three wordings."""
    return _plus_one(_numbers(question)[-1 if "friends" in question else 0])


def nameless(question: str) -> str:
    """Return the question with its capitalized words masked, so that questions that differ in names are equal."""
    return re.sub(r"\b[A-Z][a-z]+\b", "_", question)


def _question(task: Task) -> str:
    return str(task.data["entry"]["question"])


def _gold(task: Task) -> str:
    return str(task.data["entry"]["answer"])


def _plus_one(number: str) -> str:
    return str(int(number) + 1)


def _numbers(text: str) -> list[str]:
    return re.findall(r"\d+", text)


def reworded(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks about friends with female friends first. The data set lacks this wording.

    A model that takes the last number for friends fails here; one that finds the number by its noun does not.
    """
    return [_reword(task) for task in tasks if " male friends and " in _question(task)]


def _reword(task: Task) -> Task:
    swapped = {"male friends and": "female friends and", "female friends. They": "male friends. They"}
    question = re.sub("|".join(swapped), lambda match: swapped[match[0]], _question(task))
    entry = {**task.data["entry"], "question": question, "answer": _plus_one(_numbers(question)[0])}
    messages = (*task.messages[:-1], Message.user(question))
    return replace(task, messages=messages, data={**task.data, "entry": entry, "wording": "reworded"})


def run(taskset: TaskSet, seed: int, steps: int) -> SeedResult:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        began = time.perf_counter()
        make_base(taskset, base, seed)
        seconds = time.perf_counter() - began
        settings = {**SETTINGS, "model": str(base), "seed": seed, "steps": steps}
        config = resolve_config(TrainConfig, [Layer("benchmark", settings)], taskset)
        trained, train_seconds = train_config(config, taskset, Path(folder) / "learned")
        control, _ = train_config(
            config.model_copy(update={"shuffle_rewards": True}), taskset, Path(folder) / "control"
        )
        tested = taskset.tasks("test")
        return SeedResult(
            wordings=wordings(taskset),
            before=sample_scores(config, taskset, tested),
            after=sample_scores(trained, taskset, tested),
            shuffled=sample_scores(control, taskset, tested),
            reworded=sample_scores(trained, taskset, reworded(tested)),
            base_seconds=seconds,
            train_seconds=train_seconds,
        )


def wordings(taskset: TaskSet) -> list[str]:
    """Return the wording of each held-out question."""
    return [task.data["wording"] for task in taskset.tasks("test")]


def train_config(config: TrainConfig, taskset: TaskSet, folder: Path) -> tuple[TrainConfig, float]:
    """Train, and return the configuration with the trained model, and the seconds of training."""
    report = train(config.model_copy(update={"run": str(folder)}), taskset, SilentProgress())
    return config.model_copy(update={"model": str(find_trained_model(report.run))}), report.train_seconds


def make_base(taskset: TaskSet, folder: Path, seed: int) -> None:
    draws = random.Random(seed)
    conversations = record_conversations(taskset.env, taskset.tasks("train"), lambda prompt: guess(prompt, draws))
    make_tiny_base(conversations, map(str, range(10)), folder, seed, BASE_STEPS, learning_rate=BASE_RATE)


def sample_scores(config: TrainConfig, taskset: TaskSet, tasks: Sequence[Task]) -> list[float]:
    """Return the score of one sampled attempt at each task."""
    return asyncio.run(_sample_scores(config, taskset, tasks))


async def _sample_scores(config: TrainConfig, taskset: TaskSet, tasks: Sequence[Task]) -> list[float]:
    policy = load_policy(config, taskset)
    engine = TorchEngine(policy.model, policy.context_length)
    method = Method("sampled", policy.agent(engine, config, 1.0), taskset.env)
    groups = await attempts(method, taskset.scorers, tasks, 1, rollout_limits(config))
    await engine.close()
    return [score_trajectory(group.trajectories[0]).em for group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="steps of training, with true and with shuffled rewards")
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
