"""Measure the pages of the viewer on a synthetic run of 100,000 attempts: time per page, and memory of the server.

    python benchmarks/viewer.py --attempts 100000

The run is written by the writer that training uses. The viewer runs in a process of its own, as ``agent-r1 view``; each
page is requested several times over HTTP. The median time, the largest time, and the CPU time of the server per request
are printed; the CPU time does not depend on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from agent_r1.core.events import (
    AttemptFate,
    AttemptFinished,
    AttemptStarted,
    Event,
    LogEvent,
    PolicyPublished,
    StepMetrics,
    StepTimings,
    TokenRecord,
    TokensRecorded,
)
from agent_r1.core.inference import PolicyVersion, PolicyVersionSpan
from agent_r1.core.messages import Action, Message, Text, ToolCall, ToolResult
from agent_r1.core.trajectory import AttemptId, Status, Trajectory, Turn
from agent_r1.store.folder import create_run

GROUP_SIZE, GROUPS_PER_STEP, TOKENS = 16, 32, 48
WORDS = ("river", "Alba", "flows", "past", "Bruno", "mayor", "Coris", "asked", "who", "built", "old", "bridge", "Deran")
RECORDED_GROUPS = 2

PAGES = {
    "list of runs": "/",
    "run": "/run/{run}",
    "compared with itself": "/compare?run={run}&run={run}",
    "attempts, newest": "/run/{run}/attempts",
    "attempts, page in the middle": "/run/{run}/attempts?after={middle}",
    "attempts, highest reward": "/run/{run}/attempts?order=reward",
    "attempts, most tokens, middle": "/run/{run}/attempts?order=tokens&after={middle}",
    "attempts, one status": "/run/{run}/attempts?status=environment_failed",
    "attempts, one fate": "/run/{run}/attempts?fate=dropped",
    "attempts, one fate, by credit": "/run/{run}/attempts?fate=trained&order=credit&direction=up",
    "attempts, one step": "/run/{run}/attempts?step=7",
    "attempts, one task": "/run/{run}/attempts?task=train/77",
    "attempts, range of rewards": "/run/{run}/attempts?from=1.5&to=1.9&order=reward",
    "attempts, no attempt fits": "/run/{run}/attempts?from=99",
    "search, frequent text": "/run/{run}/attempts?text=mayor",
    "search, absent text": "/run/{run}/attempts?text=zebra",
    "attempt": "/run/{run}/attempt/{middle}",
    "group, side by side": "/run/{run}/group/100",
    "revision (asked every two seconds)": "/revision?run={run}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keep the run here, or use the one that is here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "synthetic"
        if not folder.exists():
            start = time.perf_counter()
            write_run(folder, arguments.attempts)
            megabytes = folder.joinpath("run.db").stat().st_size / 2**20
            print(f"{arguments.attempts} attempts written in {time.perf_counter() - start:.0f} s, {megabytes:.0f} MB")
        with serve(folder) as (url, process):
            show(measure(url, process.pid, folder.name, arguments.attempts, arguments.repeats))
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident, peak = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
            assert resident is not None and peak is not None
            print(f"memory of the server: {int(resident[1]) / 1024:.0f} MB, peak {int(peak[1]) / 1024:.0f} MB")


@dataclass(frozen=True)
class PageTimes:
    """Seconds of each request of a page, and seconds of CPU time of the server per request."""

    seconds: Sequence[float]
    cpu: float


def measure(url: str, pid: int, run: str, attempts: int, repeats: int) -> dict[str, PageTimes]:
    """Return the times of each page. Raises httpx.HTTPStatusError if a page is an error."""
    group = attempts // GROUP_SIZE // 2
    middle = f"{group}.0.0:train/{group % 500}"
    times = {}
    with httpx.Client(base_url=url.split("/?")[0], follow_redirects=True, timeout=60) as client:
        client.get(url).raise_for_status()
        for name, page in PAGES.items():
            seconds, before = [], cpu_seconds(pid)
            for _ in range(repeats):
                start = time.perf_counter()
                client.get(page.format(run=run, middle=middle)).raise_for_status()
                seconds.append(time.perf_counter() - start)
            times[name] = PageTimes(seconds, (cpu_seconds(pid) - before) / repeats)
    return times


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(times: dict[str, PageTimes]) -> None:
    table = Table("page", "median, ms", "largest, ms", "CPU, ms")
    for name, one in times.items():
        shown = (statistics.median(one.seconds), max(one.seconds), one.cpu)
        table.add_row(name, *(f"{1000 * value:.0f}" for value in shown))
    Console().print(table)


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the viewer on one run in another process, and yield its address."""
    command = [sys.executable, "-m", "agent_r1.cli", "view", str(folder.absolute()), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.terminate()
        process.wait(30)


def write_run(folder: Path, attempts: int) -> None:
    """Write a run of ``attempts`` attempts, in groups of GROUP_SIZE and steps of GROUPS_PER_STEP groups."""
    random.seed(0)
    per_step = GROUP_SIZE * GROUPS_PER_STEP
    steps = -(-attempts // per_step)
    config = {"steps": steps, "taskset": "synthetic", "model": "tiny-base", "algorithm": {"name": "grpo"}}
    with closing(create_run(folder, config)) as writer:
        asyncio.run(writer.record(PolicyPublished(PolicyVersion(0, 0, "0"))))
        for step in range(1, steps + 1):
            numbers = range((step - 1) * per_step, min(step * per_step, attempts))
            asyncio.run(writer.record(*step_events(folder.name, step, steps, numbers)))
        asyncio.run(writer.record(LogEvent("completed", f"{steps} steps")))


def step_events(run: str, step: int, steps: int, numbers: range) -> Iterator[Event]:
    """Yield the events of one step whose attempts have the given numbers."""
    trajectories = [make_trajectory(run, number, step) for number in numbers]
    for trajectory in trajectories:
        yield AttemptStarted(trajectory.attempt, "train", step - 1)
        yield AttemptFinished(trajectory)
        if trajectory.status is Status.ENVIRONMENT_FAILED:
            yield AttemptFate(trajectory.attempt, "dropped", step, "the environment failed")
        else:
            yield AttemptFate(trajectory.attempt, "trained", step, credit=random.gauss(0, 10))
    recorded = [one for one in trajectories if one.attempt.sample_index < GROUP_SIZE][: RECORDED_GROUPS * GROUP_SIZE]
    yield TokensRecorded(tuple(make_record(one, turn) for one in recorded for turn in one.turns))
    yield PolicyPublished(PolicyVersion(step, step, str(step)))
    done = step / steps
    values = {f"metric_{number}": random.gauss(done, 0.1) for number in range(25)}
    values |= {"reward": done + random.gauss(0, 0.05), "reward/em": done, "reward/found": 1 + done, "entropy": 2 - done}
    values |= {status.value: float(one == "completed") for one, status in Status.__members__.items()}
    values |= {"completed": float(len(numbers)), "tokens": 3.0 * TOKENS * len(numbers), "calls": 900.0}
    values |= {"invalid_calls": 9.0, "failed_calls": 3.0, "staleness": 1.0, "logprob_gap": 1e-3, "kl_old": 1e-4}
    yield StepMetrics(step, values | ({"validation_em": done} if step % 5 == 0 else {}))
    yield StepTimings(step, {"rollout_seconds": 3.0, "update_seconds": 2.0, "tokens_per_second": 900 + 100 * done})


def make_trajectory(run: str, number: int, step: int) -> Trajectory:
    group, index = divmod(number, GROUP_SIZE)
    failed = random.random() < 0.01
    status = Status.ENVIRONMENT_FAILED if failed else Status.COMPLETED if number % 20 else Status.OUT_OF_TURNS
    return Trajectory(
        attempt=AttemptId(run, f"train/{group % 500}", group, index),
        task_id=f"train/{group % 500}",
        turns=tuple(make_turn(turn, step) for turn in range(1 if failed else 3)),
        status=status,
        rewards={} if failed else {"em": float(random.random() < 0.4), "f1": round(random.random(), 3)},
        reason="the environment raised ConnectionError: no route to host" if failed else None,
        start=(Message.system("Answer with a name."), Message.user(sentence())),
        seconds=random.random() * 9,
    )


def make_turn(index: int, step: int) -> Turn:
    call = ToolCall(f"call_{index}", "search", {"query": sentence()}, "{}")
    text = sentence()
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        new_ids=tuple(random.randrange(300) for _ in range(TOKENS)),
        action_ids=tuple(random.randrange(300) for _ in range(TOKENS)),
        logprobs=tuple(-random.random() for _ in range(TOKENS)),
        version_spans=(PolicyVersionSpan(0, step - 1),),
        finish_reason="stop",
        action=Action(Message.assistant(text, (call,)), text),
        observation=(Message.tool(sentence(), f"call_{index}"),),
        results=(ToolResult((Text(sentence()),), True),),
        call_rewards=({"found": float(index == 1)},),
        call_ends=(TOKENS - 1,),
    )


def make_record(trajectory: Trajectory, turn: Turn) -> TokenRecord:
    trainer = tuple(value + random.gauss(0, 0.01) for value in turn.logprobs)
    advantages = tuple(random.gauss(0, 1) for _ in turn.action_ids)
    weights, entropies = (0.01,) * len(advantages), tuple(random.random() for _ in advantages)
    return TokenRecord(trajectory.attempt, turn.index, trainer, advantages, weights, entropies)


def sentence() -> str:
    return " ".join(random.choices(WORDS, k=14))


if __name__ == "__main__":
    main()
