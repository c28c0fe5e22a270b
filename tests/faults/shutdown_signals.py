"""T22: the program is stopped by signals in the middle of training, and resumed later."""

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

from fault_case import NOTHING, Case, Control, Outcome, Size
from killed_training import OTHER_RESULT, without_moments
from micro_run import Break, count_positions, find_violations, intact, result_of, run_reference
from processes import Child, Countdown
from scenarios import GRPO, MICRO

from agent_r1 import cli

SIGNALS: Mapping[tuple[Signals, ...], str] = {
    (Signals.SIGTERM,): f"exit code {cli.SIGNALLED + Signals.SIGTERM}",
    (Signals.SIGINT, Signals.SIGINT): f"exit code {cli.INTERRUPTED}",
    (Signals.SIGINT,): f"exit code {cli.INTERRUPTED}",
    (Signals.SIGHUP,): f"exit code {-Signals.SIGHUP}",
}
"""Signals, and the required end of the process."""


def signal_runs(size: Size, breaking: Break = intact) -> Outcome:
    """Send signals to the command somewhere in training, then resume with the command."""
    outcome, drawn = NOTHING, random.Random(size.seed)
    with tempfile.TemporaryDirectory() as place:
        expected, positions = run_reference(Path(place) / "whole", GRPO)
        for number in range(size.injections):
            sent, expected_end = list(SIGNALS.items())[number % len(SIGNALS)]
            folder, position = Path(place) / f"run-{number}", drawn.randint(positions // 3, positions * 2 // 3)
            ended = Child(_train, folder, Countdown(position, sent)).wait()
            broken = [] if ended.error == expected_end else [f"ended by {ended.error}, not {expected_end}"]
            broken += find_violations(folder, Path(place) / "no log")
            again = Child(_resume, folder, breaking).wait()
            broken += [] if again.error == "exit code 0" else [f"resumed, it ended by {again.error}"]
            broken += find_violations(folder, Path(place) / "no log")
            broken += [] if result_of(folder) == expected else [OTHER_RESULT]
            names = "+".join(one.name for one in sent)
            outcome += Outcome(1, tuple(f"{names} at {position}: {line}" for line in broken), {names: 1})
    return outcome


def _train(folder: Path, countdown: Countdown) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the caller may ignore signals
    for one in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    count_positions(countdown)
    settings = [f"--{key}={value}" for key, value in {**MICRO, **GRPO.settings}.items()]
    _command("train", "--run", str(folder), *settings)


def _resume(folder: Path, breaking: Break) -> None:
    breaking()
    _command("train", "--run", str(folder), "--resume")


def _command(*arguments: str) -> None:
    """Run the program in this process, which it ends."""
    sys.argv = ["agent-r1", *arguments, "--quiet", "--json"]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        cli.enter()


SIGNALLED = Case(
    "T22",
    "SIGTERM, SIGINT once and twice, SIGHUP to the command in training",
    "it saves itself and ends with 130 or 143, at once after a second signal; resumed: the same digest and weights",
    signal_runs,
    40,
    2,
    (Control("moments not restored", OTHER_RESULT, lambda size: signal_runs(size, without_moments), 1),),
)
