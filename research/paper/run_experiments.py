"""Running cells: each a command in a process of its own, some at a time, none that is done already."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.core.errors import AgentR1Error
from agent_r1.store import RunReader
from agent_r1.store.atomic_fs import atomic_write
from agent_r1.training.progress import Progress
from research.paper.experiments import Cell, Curve, Origin, Result, Score, keep, kept, origin, result_file


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that came to nothing, and why, in one line."""

    method: str
    seed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of cells, in the order in which they were asked for."""

    results: tuple[Result, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended: its exit code (minus a signal's number), the last line of stdout, and stderr."""

    code: int
    last: str
    errors: bytes


async def run_cells(cells: Sequence[Cell], folder: Path, jobs: int, progress: Progress) -> Outcomes:
    """Run the cells that ``folder`` holds no result of, ``jobs`` at a time; a failure stops none of the others.

    Cancelled, it ends its processes; what was done by then is kept. Raises InvalidInput where a result is broken.
    """
    done = [kept(result_file(folder, cell)) for cell in cells]
    _say_done(done, progress)
    gate = asyncio.Semaphore(jobs)

    async def outcome(cell: Cell, result: Result | None) -> Result | Failure:
        if result is not None:
            return result
        async with gate:
            outcome = await _run(cell, folder, progress)
        progress.print_line(f"{cell.title}: {_said(outcome)}")
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(cell, result)) for cell, result in zip(cells, done, strict=True)]
    outcomes = [task.result() for task in tasks]
    return Outcomes(
        tuple(outcome for outcome in outcomes if isinstance(outcome, Result)),
        tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
    )


def _say_done(done: Sequence[Result | None], progress: Progress) -> None:
    there = [result for result in done if result is not None]
    now = origin()
    older = sum(result.origin != now for result in there)
    made = f", {older} of them made by other code or versions" if older else ""
    progress.print_line(f"{len(there)} of {len(done)} cells are done already{made}")


def _said(outcome: Result | Failure) -> str:
    if isinstance(outcome, Failure):
        return f"failed: {outcome.reason}"
    return ", ".join(f"{split} {score.em:.3f}" for split, score in outcome.scores.items())


async def _run(cell: Cell, folder: Path, progress: Progress) -> Result | Failure:
    progress.print_line(f"{cell.title}: agent-r1 {' '.join(cell.arguments)}")
    try:
        return await _attempt(cell, folder)
    except (OSError, AgentR1Error) as error:  # a full disk, a record that cannot be read
        return Failure(cell.method.name, cell.seed, str(error))


async def _attempt(cell: Cell, folder: Path) -> Result | Failure:
    run = _fresh(folder / cell.name) if cell.method.door == "train" else None
    place = () if run is None else ("--run", str(run))
    made_by = origin()
    ended = await _execute(*cell.arguments, *place, "--json", "--quiet")
    if ended.code != 0:
        log = folder / f"{cell.name}.log"
        atomic_write(log, ended.errors)
        return Failure(cell.method.name, cell.seed, f"{_reason(ended)} (all it said: {log})")
    result = _result(cell, run, made_by, json.loads(ended.last))
    keep(result_file(folder, cell), result)
    return result


def _fresh(folder: Path) -> Path:
    """The first of NAME, NAME-2, NAME-3 .. that nothing stands in: what an interrupted run left is not touched."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{again}") for again in itertools.count(2)))
    return next(path for path in names if not os.path.lexists(path))


async def _execute(*arguments: str) -> Ended:
    """One command of ours in a process of its own; cancelled, the process is ended."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent_r1.cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()  # a ledger loses nothing by it
            await process.wait()
    assert process.returncode is not None, "communicate waits for the end"
    return Ended(process.returncode, "".join(out.decode().splitlines()[-1:]), errors)


def _reason(ended: Ended) -> str:
    if ended.code < 0:
        return f"killed by {signal.Signals(-ended.code).name}"
    said = [line for line in ended.errors.decode(errors="replace").splitlines() if line.strip()]
    return said[-1].removeprefix("agent-r1: ") if said else f"exit code {ended.code}"


def _result(cell: Cell, run: Path | None, made_by: Origin, report: dict[str, Any]) -> Result:
    """What a command printed, as a result. ``report`` is the JSON object of ``train`` or ``eval``."""
    row = report["table"][cell.method.row]
    return Result(
        method=cell.method.name,
        seed=cell.seed,
        command=f"agent-r1 {' '.join(cell.arguments)}",
        scores={split: Score(values["em"], values["n"]) for split, values in row.items()},
        origin=made_by,
        run=None if run is None else str(run),
        seconds=None if run is None else report["train_seconds"],
        curve=None if run is None else curve_of(run),
    )


def curve_of(run: Path) -> Curve:
    """How a run learned, from its record."""
    with closing(RunReader(run)) as reader:
        measured = list(reader.metrics())
    return Curve(
        reward=tuple((each.step, each.values["reward"]) for each in measured),
        validation=tuple(
            (each.step, each.values["validation_em"]) for each in measured if "validation_em" in each.values
        ),
    )
