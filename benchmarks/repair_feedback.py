"""Whether an agent uses what the tool of ``code-repair`` tells it: in training, and on the test functions.

    python benchmarks/repair_feedback.py --run runs/repair runs/repair-shuffled
    python benchmarks/repair_feedback.py --model smollm2-135m runs/repair/model
    python benchmarks/repair_feedback.py --model runs/repair/model --attempts 3 --temperature 0.9

With ``--run``, the table has a row for every few optimizer steps of recorded runs. With ``--model``, it has two rows
for each model: attempts at the test functions with the true results of the tool, and with results of other functions
(the setting ``shuffle_feedback``). An agent that uses the results keeps an edit more often after a test that passed
than after one that failed, and corrects more failed first edits with true results than with others.

Intervals are Wilson's 95 % intervals. The n of an interval is the number of functions, because attempts at one
function are not independent.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from agent_r1.config import Layer, read_toml, restrict, settings_of
from agent_r1.core.errors import AgentR1Error
from agent_r1.core.task import Task
from agent_r1.core.trajectory import Trajectory
from agent_r1.inference.torch_engine import TorchEngine
from agent_r1.rewards.scoring import format as valid_form
from agent_r1.store.folder import run_folder
from agent_r1.store.reader import RunReader
from agent_r1.tasksets import build
from agent_r1.training.build import rollout_limits
from agent_r1.training.config import EvalConfig, TrainConfig, resolve_config
from agent_r1.training.evaluate import Method, attempts
from agent_r1.training.policy import load_policy
from agent_r1.training.tables import wilson_interval
from environments.code_repair import first_try

DATA = [Path("recipes/code_repair_data.toml"), Path("recipes/code_repair_shuffled.toml")]
NO_TASK = Task("", ())
COLUMNS = ("fixed", "valid form", "first fix", "corrected", "kept after pass", "kept after fail")


@dataclass(frozen=True, slots=True)
class Share:
    """How many of ``of`` attempts have a property, and how many functions these attempts are at."""

    having: int
    of: int
    functions: int

    def __str__(self) -> str:
        if not self.of:
            return "-"
        low, high = wilson_interval(self.having / self.of, self.functions)
        return f"{self.having / self.of:.2f} ({low:.2f}-{high:.2f})\n{self.having} of {self.of}"


def shares(trajectories: Sequence[Trajectory]) -> dict[str, Share]:
    """Return the share of each column. Attempts that could not be graded are ignored."""
    judged = [t for t in trajectories if t.rewards.get("fixed") is not None]
    tries = [(t, found) for t in judged if (found := first_try(t)) is not None]

    def share(pairs: Sequence[tuple[Trajectory, bool]]) -> Share:
        return Share(sum(has for _, has in pairs), len(pairs), len({t.task_id for t, _ in pairs}))

    fixed = [(t, t.rewards["fixed"] == 1) for t in judged]
    return {
        "fixed": share(fixed),
        "valid form": share([(t, valid_form(t, NO_TASK) == 1) for t in judged]),
        "first fix": share([(t, t.rewards["first_fixed"] == 1) for t in judged]),
        "corrected": share([(t, has) for t, has in fixed if t.rewards["first_fixed"] == 0]),
        "kept after pass": share([(t, kept) for t, (passed, kept) in tries if passed]),
        "kept after fail": share([(t, kept) for t, (passed, kept) in tries if not passed]),
    }


def of_run(run: Path, steps: int) -> Iterator[tuple[str, list[Trajectory]]]:
    """Yield a label and the training attempts of every ``steps`` optimizer steps of a recorded run."""
    with closing(RunReader(run)) as reader:
        per_step = int(reader.config()["groups_per_step"])
        found: dict[int, list[Trajectory]] = {}
        for trajectory in reader.trajectories("train"):
            found.setdefault(trajectory.attempt.group_id // (per_step * steps), []).append(trajectory)
    for number, some in sorted(found.items()):
        yield f"{run.name}, steps {number * steps + 1}-{(number + 1) * steps}", some


async def of_model(
    model: str, config_file: Path, files: Sequence[Path], size: int, temperature: float
) -> list[tuple[str, list[Trajectory]]]:
    """Return a label and the attempts of a model at the test functions, for each file of settings.

    Args:
        model: the model, as for ``agent-r1 eval``.
        config_file: the settings of the training run.
        files: settings of the task set. Each file has its own tool results.
        size: the number of attempts at each function.
        temperature: the temperature at which actions are sampled; 0: greedy.
    """
    layers = [Layer("options", {"model": model}), restrict(read_toml(config_file), EvalConfig, TrainConfig)]
    tasksets = {
        file: build("code-repair", file, None, settings_of(EvalConfig, layers).get("seed", 0)) for file in files
    }
    config = resolve_config(EvalConfig, layers, next(iter(tasksets.values())))
    torch.set_num_threads(config.threads)
    policy = load_policy(config, None, config.engine.dtype)
    engine, rows = TorchEngine(policy.model, policy.context_length, config.engine), []
    try:
        for file, taskset in tasksets.items():
            method = Method(model, policy.agent(engine, config, temperature), taskset.env)
            groups = await attempts(method, taskset.scorers, taskset.tasks("test"), size, rollout_limits(config))
            some = [trajectory for group in groups for trajectory in group.trajectories]
            rows.append((f"{model}\n{file.stem}", some))
    finally:
        await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="*", default=[], help="recorded runs, whose training attempts are counted")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a row of --run")
    parser.add_argument("--model", nargs="*", default=[], help="models that make attempts at the test functions")
    parser.add_argument("--config", type=Path, default=Path("recipes/code_repair.toml"), help="settings of the run")
    parser.add_argument("--data", type=Path, nargs="+", default=DATA, help="settings of the task set: a row for each")
    parser.add_argument("--attempts", type=int, default=1, help="attempts at each function")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of the attempts; 0: greedy")
    arguments = parser.parse_args()
    if not arguments.run and not arguments.model:
        parser.error("give --run or --model")
    if arguments.steps < 1 or arguments.attempts < 1:
        parser.error("--steps and --attempts must be at least 1")
    table = Table("", *COLUMNS, "functions")
    options = arguments.config, arguments.data, arguments.attempts, arguments.temperature
    try:
        rows = [row for run in arguments.run for row in of_run(run_folder(run), arguments.steps)]
        for model in arguments.model:
            rows += asyncio.run(of_model(model, *options))
    except (AgentR1Error, OSError) as error:
        parser.error(str(error))
    for label, trajectories in rows:
        found = shares(trajectories)
        table.add_row(label, *(str(found[name]) for name in COLUMNS), str(found["fixed"].functions))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
