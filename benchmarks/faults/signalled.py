"""T22: the program is told to stop, in the middle of training, and goes on later."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from signal import Signals

from case import NOTHING, Case, Control, Outcome, Size
from killed_training import OTHERWISE, without_moments
from micro import Break, found_broken, intact, made_by, reference, watch
from processes import Child, Countdown
from scenarios import GRPO, MICRO

from agent_r1 import cli

SENT: Mapping[tuple[Signals, ...], str] = {
    (Signals.SIGTERM,): f"exit code {cli.SIGNALLED + Signals.SIGTERM}",
    (Signals.SIGINT, Signals.SIGINT): f"exit code {cli.INTERRUPTED}",
    (Signals.SIGINT,): f"exit code {cli.INTERRUPTED}",
    (Signals.SIGHUP,): f"exit code {-Signals.SIGHUP}",
}
"""Signals, and how the process has to end."""


def signalled(size: Size, breaking: Break = intact) -> Outcome:
    """Runs of the command that are signalled somewhere, and gone on with by the command."""
    outcome, drawn = NOTHING, random.Random(size.seed)
    with tempfile.TemporaryDirectory() as place:
        made, positions = reference(Path(place) / "whole", GRPO)
        for number in range(size.injections):
            sent, ending = list(SENT.items())[number % len(SENT)]
            folder, position = Path(place) / f"run-{number}", drawn.randint(positions // 3, positions * 2 // 3)
            ended = Child(_train, folder, Countdown(position, sent)).wait()
            broken = [] if ended.error == ending else [f"ended by {ended.error}, not {ending}"]
            broken += found_broken(folder, Path(place) / "no log")
            again = Child(_resume, folder, breaking).wait()
            broken += [] if again.error == "exit code 0" else [f"resumed, it ended by {again.error}"]
            broken += found_broken(folder, Path(place) / "no log")
            broken += [] if made_by(folder) == made else [OTHERWISE]
            names = "+".join(one.name for one in sent)
            outcome += Outcome(1, tuple(f"{names} at {position}: {line}" for line in broken), {names: 1})
    return outcome


def _train(folder: Path, countdown: Countdown) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what began this table may have signals ignored
    for one in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    watch(countdown)
    settings = [f"--{key}={value}" for key, value in {**MICRO, **GRPO.settings}.items()]
    _command("train", "--run", str(folder), *settings)


def _resume(folder: Path, breaking: Break) -> None:
    breaking()
    _command("train", "--run", str(folder), "--resume")


def _command(*arguments: str) -> None:
    """The program, in this process, which it ends."""
    sys.argv = ["agent-r1", *arguments, "--quiet", "--json"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        cli.enter()


SIGNALLED = Case(
    "T22",
    "SIGTERM, SIGINT once and twice, SIGHUP to the command in training",
    "it saves itself and ends by 130 or 143, at once where it is told again; resumed: the same digest and weights",
    signalled,
    40,
    2,
    (Control("moments not restored", OTHERWISE, lambda size: signalled(size, without_moments), 1),),
)
