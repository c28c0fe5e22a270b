"""Hostile input: no option and no file ends a command in a traceback, or makes it hang.

    python tests/faults/hostile_inputs.py            every option with every value, every file (twenty minutes)
    python tests/faults/hostile_inputs.py --short    a few values of each option, some files

Every command runs in this process. An invocation that is accepted stops where training, an evaluation or a server would
begin. Exit code 1 if an invocation raised, hung, said more or less than one line, or left a file behind.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hostile_files import file_invocations, prepare
from hostile_options import Invocation, option_invocations

from agent_r1.cli import main as run_command_line
from agent_r1.retrieval.server import RetrievalServer
from agent_r1.reward_models import train as train_reward
from agent_r1.training import (
    chat as serve,
    check,
    environments as environment_workers,
    evaluate,
    run,
    smoke,
    train_critic,
)
from agent_r1.viewer.server import ViewerServer

SECONDS = 10
"""Time that an invocation may take."""

MEMORY = 12 * 2**30
"""Memory that all of this may take, so that a file without end harms nothing else."""


class Accepted(BaseException):
    """The invocation would begin its work now."""


class Hung(BaseException):
    """The invocation took too long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an invocation ended: "accepted", "done", "refused", "failed", "raised" or "hung", with its last output."""

    how: str
    problem: str | None
    seconds: float


def accept(*arguments: Any, **settings: Any) -> None:
    raise Accepted


async def accept_later(*arguments: Any, **settings: Any) -> None:
    raise Accepted


@contextmanager
def stopped_before_work(seconds: int) -> Iterator[None]:
    """Stop accepted invocations where their work would begin, and those that hang after some seconds."""

    def hang(number: int, frame: object) -> None:
        raise Hung

    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)}
    with ExitStack() as stack:
        stack.enter_context(patch.object(run, "_train_and_close", accept))
        stack.enter_context(patch.object(evaluate, "_evaluate", accept_later))
        stack.enter_context(patch.object(check, "_play", accept_later))
        stack.enter_context(patch.object(RetrievalServer, "run", accept))
        stack.enter_context(patch.object(ViewerServer, "run", accept))
        stack.enter_context(patch.object(smoke, "smoke", accept))
        stack.enter_context(patch.object(train_critic, "fit", accept))
        stack.enter_context(patch.object(train_reward, "_fit", accept))
        stack.enter_context(patch.object(serve, "_serve", accept_later))
        stack.enter_context(patch.object(environment_workers, "_serve", accept_later))
        stack.enter_context(patch.object(sys, "stdin", io.StringIO()))
        signal.signal(signal.SIGALRM, hang)
        signal.alarm(seconds)
        try:
            yield
        finally:
            signal.alarm(0)
            torch.set_num_threads(1)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def attempt(invocation: Invocation, folder: Path, seconds: int) -> Ended:
    """Run the command in a copy of nothing but ``folder``'s files, and return how it ended."""
    before, began = _names(folder), time.monotonic()
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")  # as strict as a terminal
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    problem, how = None, ""
    with redirect_stdout(out), redirect_stderr(err):
        try:
            with stopped_before_work(seconds):
                code = run_command_line(invocation.arguments)
                out.flush()
            how = {0: "done", 1: "failed", 2: "refused"}.get(code, f"exit code {code}")
            problem = _problem(code, err.buffer.getvalue().decode())
        except Accepted:
            how = "accepted"
        except Hung as hung:
            how, problem = "hung", f"still running after {seconds} s{_place(hung)}"
        except BaseException as error:
            how, problem = "raised", f"{type(error).__name__}: {str(error)[:100]}{_place(error)}"
    if invocation.must_be_refused and problem is None and how != "refused":
        problem = "should have been refused"
    if how == "refused" and problem is None and (left := _names(folder) - before):
        problem = f"left {sorted(left)[:3]}"
    for name in _names(folder) - before:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return Ended(how, problem, time.monotonic() - began)


def _names(folder: Path) -> set[str]:
    return {*os.listdir(folder), *(f"runs/{name}" for name in os.listdir(folder / "runs"))} - {"__pycache__"}


def _problem(code: int, err: str) -> str | None:
    """Return what is wrong with how a command ended, None if nothing is."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if "Traceback" in err:
        return "it printed a traceback"
    lines = [line for line in err.splitlines() if line.startswith("agent-r1: ")]
    if code == 2 and (len(lines) != 1 or len(err.rstrip().splitlines()) > 3):
        return f"{len(err.splitlines())} lines on stderr: {err[:200]!r}"
    if code == 2 and len(err) > 2000:
        return f"a line of {len(err)} characters: {err[:80]!r}"
    return None


def _place(error: BaseException) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "agent_r1" in one.filename]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def invocations(kind: str, short: bool, folder: Path, seed: int) -> Iterator[Invocation]:
    """Yield the invocations of a kind, "options" or "files"; each file is made right before it is yielded."""
    generator = random.Random(seed)
    if kind == "options":
        yield from option_invocations(1 if short else None, generator)
    else:
        yield from file_invocations(folder, 1 if short else None, generator)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=["options", "files"], default=["options", "files"])
    parser.add_argument("--match", default="", help="only invocations whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time that an invocation may take")
    options = parser.parse_args(words)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    logging.getLogger("agent_r1").setLevel(logging.CRITICAL)
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        folder = prepare(Path(place))
        os.chdir(folder)
        for kind in options.kinds:
            counts: Counter[str] = Counter()
            for invocation in invocations(kind, options.short, folder, options.seed):
                if options.match not in invocation.name:
                    continue
                ended = attempt(invocation, folder, options.seconds)
                counts[ended.how] += 1
                if ended.problem is not None:
                    bad += 1
                    print(f"{invocation.name}: {ended.how}: {ended.problem}".encode("ascii", "replace").decode())
            print(f"{kind}: {counts.total()} invocations: {', '.join(f'{n} {how}' for how, n in counts.items())}")
        os.chdir("/")
    print(f"{bad} problems")
    return int(bad > 0)


if __name__ == "__main__":
    asyncio.set_event_loop(None)
    sys.exit(main())
