"""T5b: a second process goes on with a run that a first one is writing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from case import NOTHING, Case, Control, Outcome, Size
from killed_training import OTHERWISE
from micro import Break, Made, found_broken, go, intact, made_by, reference, watch
from processes import Child, Countdown
from scenarios import GRPO

from agent_r1 import cli
from agent_r1.store import writer as ledger
from agent_r1.training.progress import SilentProgress

FIRST, LAST = 0.1, 0.9
"""Between these shares of all it passes a run is there, and not complete."""

LET_IN = "it was not refused"


def second_process(size: Size, breaking: Break = intact) -> Outcome:
    """Runs that are stopped in the middle, asked for by a second process, and let go on."""
    outcome = NOTHING
    with tempfile.TemporaryDirectory() as place:
        made, positions = reference(Path(place) / "whole", GRPO)
        for number in range(size.injections):
            share = FIRST + (LAST - FIRST) * (number + 0.5) / size.injections
            folder, position = Path(place) / f"run-{number}", int(share * positions)
            broken = _both(folder, position, made, breaking)
            outcome += Outcome(1, tuple(f"stopped at {position} of {positions}: {line}" for line in broken))
    return outcome


def _both(folder: Path, position: int, made: Made, breaking: Break) -> list[str]:
    first = Child(_train, folder, position)
    if not first.stopped():
        return [f"the first did not stop but ended: {first.wait().error}"]
    said = folder.with_name(f"{folder.name}.said")
    second = Child(_resume, folder, said, breaking).wait().error
    broken = list(_unlike_a_refusal(second, said.read_text(), first.pid))
    first.go_on()
    ended = first.wait()
    broken += (
        [f"the first ended by {ended.error}"]
        if ended.error is not None
        else found_broken(folder, folder.with_name("no log"))
    )
    return broken if ended.error is not None or made_by(folder) == made else [*broken, OTHERWISE]


def _unlike_a_refusal(ended: str | None, said: str, owner: int) -> list[str]:
    lines = said.splitlines()
    if ended != f"exit code {cli.BAD_INPUT}":
        return [f"{LET_IN}, but ended by {ended}: {said[-200:]}"]
    if len(lines) != 1 or "another process is writing" not in lines[0] or str(owner) not in lines[0]:
        return [f"no line that names process {owner}, but {lines}"]
    return []


def _train(folder: Path, position: int) -> None:
    watch(Countdown(position, (signal.SIGSTOP,)))
    go(folder, GRPO, SilentProgress())


def _resume(folder: Path, said: Path, breaking: Break) -> None:
    """The program, as a person starts it: what it says on stderr is kept."""
    breaking()
    sys.argv = ["agent-r1", "train", "--run", str(folder), "--resume"]
    for descriptor, place in ((1, Path(os.devnull)), (2, said)):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT), descriptor)
    cli.enter()


def unlocked() -> None:
    """A process takes a run without asking who has it."""
    ledger._lock = lambda folder: os.open(folder, os.O_RDONLY)


def nameless() -> None:
    """Who has a run is not asked of the kernel."""
    ledger._holder = lambda folder: ""


SECOND_PROCESS = Case(
    "T5b",
    "a second process goes on with a run, by --resume, while the first is anywhere in its writing",
    "exit code 2 and one line that names the first's process; the first comes to the same digest and weights",
    second_process,
    20,
    2,
    (
        Control("the lock is not asked for", LET_IN, lambda size: second_process(size, unlocked), 1),
        Control("who has it is not said", "no line that names", lambda size: second_process(size, nameless), 1),
    ),
)
