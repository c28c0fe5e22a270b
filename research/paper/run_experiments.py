"""Running of experiments: each is a command in its own process, and those that have a result are not run again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error
from agent_r1.core.files import atomic_write
from agent_r1.store.reader import RunReader
from agent_r1.training.progress import Progress
from research.paper.experiments import (
    Experiment,
    Provenance,
    Result,
    Score,
    Training,
    current_provenance,
    load_result,
    read_curve,
    result_file,
    save_result,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An experiment that failed, and the reason in one line."""

    method: str
    base: int
    seed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The results and failures of experiments, in the order in which the experiments were given."""

    results: tuple[Result, ...]
    failures: tuple[Failure, ...]


async def run_experiments(experiments: Sequence[Experiment], folder: Path, jobs: int, progress: Progress) -> Outcomes:
    """Run the experiments that have no result in ``folder``, ``jobs`` at a time. A failure does not stop the others.

    Cancelling ends the running processes; finished results are kept.
    """
    saved = [load_result(result_file(folder, experiment)) for experiment in experiments]
    done, current = [result for result in saved if result is not None], current_provenance()
    older = sum(result.provenance != current for result in done)
    note = f", {older} of them by other code or library versions" if older else ""
    progress.print_line(f"{len(done)} of {len(saved)} experiments are done already{note}")
    slots = asyncio.Semaphore(jobs)

    async def run_unless_saved(experiment: Experiment, result: Result | None) -> Result | Failure:
        if result is not None:
            return result
        async with slots:
            outcome = await _run(experiment, folder, progress)
        progress.print_line(f"{experiment.title}: {_summary(outcome)}")
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_unless_saved(*pair)) for pair in zip(experiments, saved, strict=True)]
    outcomes = [task.result() for task in tasks]
    return Outcomes(
        tuple(outcome for outcome in outcomes if isinstance(outcome, Result)),
        tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
    )


def load_finished(experiments: Sequence[Experiment], folder: Path) -> Outcomes:
    """Return the results that ``folder`` holds already."""
    saved = (load_result(result_file(folder, experiment)) for experiment in experiments)
    return Outcomes(tuple(result for result in saved if result is not None), ())


def _summary(outcome: Result | Failure) -> str:
    if isinstance(outcome, Failure):
        return f"failed: {outcome.reason}"
    return ", ".join(
        f"{split} {score.greedy:.2f} greedy, {score.sampled:.2f} sampled" for split, score in outcome.scores.items()
    )


async def _run(experiment: Experiment, folder: Path, progress: Progress) -> Result | Failure:
    # An interrupted run is left as it is: the folder is the first of NAME, NAME-2, NAME-3 .. that does not exist.
    names = (experiment.name, *(f"{experiment.name}-{number}" for number in range(2, 1000)))
    run = next(path for name in names if not os.path.lexists(path := folder / name))
    provenance, report = current_provenance(), {}
    try:
        for command in experiment.commands(str(run)):
            progress.print_line(f"{experiment.title}: agent-r1 {' '.join(command)}")
            code, stdout, stderr = await _execute(*command, "--json", "--quiet")
            if code != 0:
                log = folder / f"{experiment.name}.log"
                atomic_write(log, stderr)
                last = stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
                reason = f"killed by {signal.Signals(-code).name}" if code < 0 else last[0].removeprefix("agent-r1: ")
                return _failure(experiment, f"{reason} (full output: {log})")
            report = json.loads(stdout.splitlines()[-1])
        result = _make_result(experiment, run, provenance, report)
        save_result(result_file(folder, experiment), result)
    except (OSError, AgentR1Error) as error:  # a full disk, an unreadable run
        return _failure(experiment, str(error))
    return result


def _failure(experiment: Experiment, reason: str) -> Failure:
    return Failure(experiment.method.name, experiment.base.seed, experiment.seed, reason)


async def _execute(*arguments: str) -> tuple[int, bytes, bytes]:
    """Run an agent-r1 command in its own process; return exit code, stdout and stderr. Cancelling kills the process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent_r1.cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()  # the run store survives it
            await process.wait()
    assert process.returncode is not None, "communicate waits for the end"
    return process.returncode, stdout, stderr


def _make_result(experiment: Experiment, run: Path, provenance: Provenance, report: dict[str, Any]) -> Result:
    """Return the result in the JSON object ``report`` that ``eval`` printed last."""
    key = "trained" if experiment.method.trains else experiment.method.name
    greedy, sampled = report["table"][key], report["pass_at_k"][key]["cells"]
    return Result(
        method=experiment.method.name,
        base=experiment.base.seed,
        seed=experiment.seed,
        commands=tuple(f"agent-r1 {' '.join(command)}" for command in experiment.commands(str(run))),
        scores={split: Score(cell["em"], sampled[split]["one"], cell["n"]) for split, cell in greedy.items()},
        provenance=provenance,
        training=read_training(run) if experiment.method.trains else None,
    )


def read_training(run: Path) -> Training:
    """Return what the run in the folder ``run`` recorded of its training."""
    with closing(RunReader(run)) as reader:
        clipped, explained = reader.curve("clip_fraction"), reader.curve("critic/explained_variance")
        last = [value for step, value in explained.items() if step > reader.last_step() * 2 / 3]
    variance = statistics.fmean(last) if last else None
    return Training(str(run), read_curve(run), statistics.fmean(clipped.values()), variance)
