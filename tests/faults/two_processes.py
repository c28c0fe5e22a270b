"""T5b: a second process resumes a run that a first one is writing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from fault_case import NOTHING, Case, Control, Outcome, Size
from killed_training import OTHER_RESULT
from micro_run import (
    Break,
    RunResult,
    count_positions,
    find_violations,
    intact,
    result_of,
    run_reference,
    train_or_resume,
)
from processes import Child, Countdown
from scenarios import GRPO

from agent_r1 import cli
from agent_r1.store import writer
from agent_r1.training.progress import SilentProgress

FIRST, LAST = 0.1, 0.9
"""Between these shares of its positions a run exists and is not complete."""

NOT_REFUSED = "it was not refused"


def second_process(size: Size, breaking: Break = intact) -> Outcome:
    """Suspend runs in the middle, resume them in a second process, then let the first continue."""
    outcome = NOTHING
    with tempfile.TemporaryDirectory() as place:
        expected, positions = run_reference(Path(place) / "whole", GRPO)
        for number in range(size.injections):
            share = FIRST + (LAST - FIRST) * (number + 0.5) / size.injections
            folder, position = Path(place) / f"run-{number}", int(share * positions)
            broken = _both(folder, position, expected, breaking)
            outcome += Outcome(1, tuple(f"stopped at {position} of {positions}: {line}" for line in broken))
    return outcome


def _both(folder: Path, position: int, expected: RunResult, breaking: Break) -> list[str]:
    first = Child(_train, folder, position)
    if not first.wait_until_suspended():
        return [f"the first was not suspended but ended: {first.wait().error}"]
    output = folder.with_name(f"{folder.name}.stderr")
    second = Child(_resume, folder, output, breaking).wait().error
    broken = list(_check_refusal(second, output.read_text("utf-8"), first.pid))
    first.resume()
    ended = first.wait()
    broken += (
        [f"the first ended by {ended.error}"]
        if ended.error is not None
        else find_violations(folder, folder.with_name("no log"))
    )
    return broken if ended.error is not None or result_of(folder) == expected else [*broken, OTHER_RESULT]


def _check_refusal(ended: str | None, output: str, owner: int) -> list[str]:
    lines = output.splitlines()
    if ended != f"exit code {cli.BAD_INPUT}":
        return [f"{NOT_REFUSED}, but ended by {ended}: {output[-200:]}"]
    if len(lines) != 1 or "another process is writing" not in lines[0] or str(owner) not in lines[0]:
        return [f"no line that names process {owner}, but {lines}"]
    return []


def _train(folder: Path, position: int) -> None:
    count_positions(Countdown(position, (signal.SIGSTOP,)))
    train_or_resume(folder, GRPO, SilentProgress())


def _resume(folder: Path, output: Path, breaking: Break) -> None:
    """Run the program as from a shell, with its stderr in a file."""
    breaking()
    sys.argv = ["agent-r1", "train", "--run", str(folder), "--resume"]
    for descriptor, place in ((1, Path(os.devnull)), (2, output)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT), descriptor)
    cli.enter()


def without_lock() -> None:
    """A process opens a run without taking the lock."""
    writer._lock = lambda folder: os.open(folder, os.O_RDONLY)


def without_owner() -> None:
    """The owner of the lock is not looked up."""
    writer.writing_process = lambda folder: None


SECOND_PROCESS = Case(
    "T5b",
    "a second process resumes a run while the first one is anywhere in its writing",
    "exit code 2 and one line that names the first's process; the first one ends with the same digest and weights",
    second_process,
    20,
    2,
    (
        Control("the lock is not taken", NOT_REFUSED, lambda size: second_process(size, without_lock), 1),
        Control("the owner is not named", "no line that names", lambda size: second_process(size, without_owner), 1),
    ),
)
