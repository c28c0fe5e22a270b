"""Training in Ray actors: two ranks and two servers on this machine (make test-ray; some minutes).

The servers are stand-ins for vLLM around the embedded engine, with its HTTP endpoints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from extras import requires
from inference.fake_vllm import write_python

from agent_r1.cli import main
from agent_r1.core.inference import PolicyVersion, WeightUpdate
from agent_r1.inference.pool import EnginePool
from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.trainer.fsdp import FsdpTrainer
from agent_r1.training.run import RANKS_RESTARTED

pytestmark = [
    requires("ray", "ray"),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are listed from /proc"),
]

OPTIONS = [
    *("--steps", "3", "--groups_per_step", "2", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "2"),
    *("--max_tokens", "20", "--reward_weights.found", "1.0", "--checkpoint_every", "1", "--context", "512"),
    *("--splits", "style-a", "--pass_k", "0", "--quiet", "--trainer.ranks", "2"),
    *("--engine.backend", "vllm", "--engine.replicas", "2", "--placement.launcher", "ray"),
]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an address of IPv6, and ::1, as the kernel lists them."""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    cores = os.cpu_count() or 1
    python = write_python(tmp_path / "python")
    return [*OPTIONS, "--engine.vllm.python", str(python), "--placement.cpus", str(min(1.0, cores / 4))]


def command_of(pid: int) -> str:
    """Return the command of a process; "" if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def parents() -> dict[int, int]:
    """Return the parent of each process of this machine that runs."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text("utf-8").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(process.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Return the processes that ``pid`` started, and those that they started."""
    table, found = parents(), {pid}
    while new := {child for child, parent in table.items() if parent in found} - found:
        found |= new
    return found - {pid}


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses (hexadecimal) at which the sockets of a process listen; none if it has ended."""
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        tables = [Path(f"/proc/{pid}/net/{file}").read_text("utf-8").splitlines() for file in ("tcp", "tcp6")]
    except OSError:
        return set()
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for table in tables for line in table[1:]]
    return {row[1].partition(":")[0] for row in rows if len(row) > 9 and row[9] in sockets and row[3] == "0A"}


def wait_until_ended(pids: set[int]) -> None:
    end = time.monotonic() + 300
    while left := pids & parents().keys():
        assert time.monotonic() < end, [command_of(pid) for pid in left]
        time.sleep(0.1)


@pytest.fixture
def kill_actors(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    seen: list[set[int]] = []
    update, call, made = EnginePool.update_weights, FsdpTrainer._call, Counter[str]()

    def kill(name: str) -> None:
        seen.append(descendants(os.getpid()))
        os.kill(min(pid for pid in seen[-1] if command_of(pid).startswith(name)), signal.SIGKILL)

    async def update_and_kill(pool: EnginePool, weights: WeightUpdate) -> PolicyVersion:
        served = await update(pool, weights)
        if served.number == 1 and made.total() and not made["server"]:
            made["server"] += 1
            kill("ray::ServerActor")
        return served

    def call_and_kill(trainer: FsdpTrainer, method: str, *arguments: object) -> list[Any]:
        made[method] += 1
        if method == "optim_step" and made[method] == 2:
            kill("ray::RankActor")
        return call(trainer, method, *arguments)

    monkeypatch.setattr(EnginePool, "update_weights", update_and_kill)
    monkeypatch.setattr(FsdpTrainer, "_call", call_and_kill)
    return seen


def test_a_run_completes_after_any_actor_was_killed_and_listens_on_loopback_only(
    options: list[str], kill_actors: list[set[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options, "--run", str(run)]) == 0
    assert verify(run).is_valid
    with closing(RunReader(run)) as reader:
        fates = Counter((fate.attempt, fate.fate) for fate in reader.fates())
        events = [(event.kind, event.detail) for event in reader.events()]
        versions = {s.version for t in reader.trajectories() for turn in t.turns for s in turn.version_spans}
    assert set(fates.values()) == {1} and len(fates) == 3 * 2 * 4 and versions == {0, 1, 2}
    assert ("devices", "Ray: 2 ranks, 2 vLLM servers on 127.0.0.1") in events
    restarts = [detail for kind, detail in events if kind == RANKS_RESTARTED]
    assert len(restarts) == 1 and "was killed by SIGKILL (restart 1 of 2)" in restarts[0]
    assert caplog.text.count("is left out") == 1
    assert len(kill_actors) == 2


@pytest.fixture
def driver(options: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ["train", *options, "--steps", "1000", "--run", str(tmp_path / "run")]
    code = f"import sys; from agent_r1.cli import main; sys.exit(main({words!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (tmp_path / "output").open("wb") as output:
        command = [sys.executable, "-c", code]
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        while not (tmp_path / "run" / "checkpoints" / "step-1").is_dir():
            assert started.poll() is None, (tmp_path / "output").read_text("utf-8")
            time.sleep(0.1)
        yield started
    finally:
        started.kill()
        started.wait()


def test_all_sockets_are_on_loopback_and_no_process_outlives_a_killed_run(driver: subprocess.Popen[bytes]) -> None:
    processes = descendants(driver.pid)
    commands = [command_of(pid) for pid in processes]
    for part in ("raylet", "gcs_server", "ray::RankActor", "ray::ServerActor", "trainer.ranks", "inference.fake_vllm"):
        assert any(part in command for command in commands), (part, commands)
    assert set().union(*map(listening_addresses, {driver.pid, *processes})) <= LOOPBACK
    driver.kill()
    driver.wait()
    wait_until_ended(processes)


def test_ctrl_c_saves_and_leaves_no_process(driver: subprocess.Popen[bytes], tmp_path: Path) -> None:
    processes = descendants(driver.pid)
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(300) == 130
    wait_until_ended(processes)
    assert verify(tmp_path / "run").is_valid


def test_impossible_requests_are_refused_in_one_line(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options, "--placement.cpus", "1000", "--run", str(run)]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("agent-r1: placement: got 4000 CPU cores for 2 ranks, 2 vLLM servers; give fewer")
    assert not run.exists()
