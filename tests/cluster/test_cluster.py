"""Training on two machines without a shared disk (make test-cluster; about ten minutes).

The machines are network namespaces with file systems of their own (machines.py). Ray joins them. The servers are
stand-ins for vLLM around the embedded engine, with its HTTP endpoints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cluster.machines import Machine, Machines, missing
from extras import requires
from inference.fake_vllm import write_python

from agent_r1.store.reader import RunReader
from agent_r1.store.verification import verify
from agent_r1.training.run import RANKS_RESTARTED

pytestmark = [requires("ray", "ray"), pytest.mark.skipif(missing() is not None, reason=missing() or "")]

PORT, SECONDS = 6379, 300.0
RAY = [
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "2", "--temp-dir", "/tmp/ray"),
    *("--object-store-memory", str(80 * 2**20), "--disable-usage-stats"),
]
OPTIONS = [
    *("--groups_per_step", "4", "--group_size", "4", "--evaluate_every", "0", "--evaluate_n", "2", "--device", "cpu"),
    *("--splits", "style-a", "--pass_k", "0", "--context", "512", "--checkpoint_every", "1", "--trainer.ranks", "2"),
    *("--reward_weights.found", "1.0"),  # each step has something to learn
]
ENVIRONMENT = {
    **os.environ,
    **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "RAY_USAGE_STATS_ENABLED": "0"},
    "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine may take its memory
    "RAY_worker_niceness": "0",  # or its cores
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}


def join(machine: Machine, head: Machine, folder: Path) -> None:
    """Let the machine start Ray: the head alone, any other machine by joining the head."""
    place = ["--head", "--port", str(PORT), "--include-dashboard", "false"]
    if machine is not head:
        place = ["--address", f"{head.address}:{PORT}"]
    log = folder / f"{machine.name}.log"
    started = machine.start([*RAY, "--node-ip-address", machine.address, *place], ENVIRONMENT, log)
    assert started.wait(SECONDS) == 0, log.read_text("utf-8")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[Machine]]:
    with Machines(2, tmp_path) as machines:
        for machine in machines:
            join(machine, machines[0], tmp_path)
        yield machines


def placement(head: Machine) -> list[str]:
    address = f"{head.address}:{PORT}"
    return ["--placement.launcher", "ray", "--placement.address", address, "--placement.host", head.address]


def start(head: Machine, run: str, *options: str) -> subprocess.Popen[bytes]:
    words = ["train", *OPTIONS, *placement(head), "--run", str(head.work / run), *options]
    return head.start([sys.executable, "-m", "agent_r1", *words], ENVIRONMENT, head.root / f"{run}.log")


def finish(head: Machine, run: str, started: subprocess.Popen[bytes]) -> str:
    code = started.wait(SECONDS)
    output = (head.root / f"{run}.log").read_text("utf-8")
    assert code == 0, output
    folder = head.root / "work" / run
    assert verify(folder).is_valid
    with closing(RunReader(folder)) as reader:
        assert set(Counter((fate.attempt, fate.fate) for fate in reader.fates()).values()) == {1}
    return output


def wait_for(text: str, head: Machine, run: str, started: subprocess.Popen[bytes]) -> None:
    log, end = head.root / f"{run}.log", time.monotonic() + SECONDS
    while text not in log.read_text("utf-8"):
        assert started.poll() is None and time.monotonic() < end, log.read_text("utf-8")
        time.sleep(0.05)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def servers(tmp_path: Path) -> list[str]:
    python = write_python(tmp_path / "python")
    return ["--engine.backend", "vllm", "--engine.replicas", "2", "--engine.vllm.python", str(python)]


def restarts(folder: Path) -> list[str]:
    with closing(RunReader(folder)) as reader:
        return [event.detail for event in reader.events() if event.kind == RANKS_RESTARTED]


def test_two_machines_compute_what_one_computes_and_resume_with_another_number_of_ranks(
    cluster: list[Machine], tmp_path: Path
) -> None:
    head, other = cluster
    # one CPU per rank and two per machine: both fit on the head, so that they are spread by asking for two
    spread = ("--placement.cpus", "2")
    output = finish(head, "two", start(head, "two", "--steps", "3", *spread))
    assert f"2 ranks on {head.address}, {other.address}" in output
    one = subprocess.run(
        [sys.executable, "-m", "agent_r1", "train", *OPTIONS, "--steps", "3", "--run", str(tmp_path / "one")],
        env=ENVIRONMENT,
    )
    assert one.returncode == 0
    folder = head.root / "work" / "two"
    assert weights(folder) == weights(tmp_path / "one")
    parts = sorted(path.name for path in (folder / "checkpoints" / "step-3").glob("trainer-*"))
    assert parts == ["trainer-00001-of-00002.safetensors", "trainer-00002-of-00002.safetensors"]
    # nothing of the run is on the other machine, and nothing is left there
    assert list((other.root / "work").iterdir()) == []
    assert [path.name for path in (other.root / "tmp").glob("agent-r1-*")] == []
    # 2 -> 1 -> 2 ranks
    resume = [sys.executable, "-m", "agent_r1", "train", "--run", str(head.work / "two"), "--resume", "--steps"]
    alone = [*resume, "4", "--trainer.ranks", "1", "--placement.launcher", "processes"]
    finish(head, "two", head.start(alone, ENVIRONMENT, head.root / "two.log"))
    both = [*resume, "5", "--trainer.ranks", "2", *placement(head), *spread]
    output = finish(head, "two", head.start(both, ENVIRONMENT, head.root / "two.log"))
    assert "step 4/4" in output and "step 5/5" in output


def test_servers_on_another_machine_get_the_weights_and_leave_nothing(cluster: list[Machine], tmp_path: Path) -> None:
    head, other = cluster
    output = finish(head, "run", start(head, "run", "--steps", "3", "--placement.cpus", "1", *servers(tmp_path)))
    assert f"2 ranks, 2 vLLM servers on {head.address}, {other.address}" in output
    with closing(RunReader(head.root / "work" / "run")) as reader:
        versions = {s.version for t in reader.trajectories() for turn in t.turns for s in turn.version_spans}
    assert versions == {0, 1, 2} and "is left out" not in output
    for machine in cluster:
        assert [path.name for path in (machine.root / "dev" / "shm").glob("agent-r1-*")] == []


@pytest.mark.parametrize("silently", [False, True], ids=["closed", "silent"])
def test_a_machine_that_is_lost_costs_no_attempt(silently: bool, cluster: list[Machine], tmp_path: Path) -> None:
    head, other = cluster
    spread = ("--placement.cpus", "0.5", "--placement.spread", "true", "--engine.vllm.stall_seconds", "20")
    started = start(head, "run", "--steps", "6", *spread, *servers(tmp_path))
    wait_for("step 2/6", head, "run", started)
    if silently:  # a loss of power closes no connection
        other.cut()
    other.kill()
    output = finish(head, "run", started)
    (restart,) = restarts(head.root / "work" / "run")
    assert "was killed by SIGKILL (restart 1 of 2)" in restart
    assert f"http://{other.address}" in output and "is left out" in output


def test_a_link_that_is_cut_for_a_while_is_waited_for(cluster: list[Machine]) -> None:
    head, other = cluster
    started = start(head, "run", "--steps", "6", "--placement.cpus", "2")
    wait_for("step 2/6", head, "run", started)
    other.cut()
    time.sleep(10)
    other.mend()
    finish(head, "run", started)
    assert restarts(head.root / "work" / "run") == []


def test_a_machine_that_stands_still_for_a_while_is_waited_for(cluster: list[Machine], tmp_path: Path) -> None:
    head, other = cluster
    spread = ("--placement.cpus", "0.5", "--placement.spread", "true")
    started = start(head, "run", "--steps", "6", *spread, *servers(tmp_path))
    wait_for("step 2/6", head, "run", started)
    other.freeze()
    time.sleep(15)
    other.thaw()
    output = finish(head, "run", started)
    assert restarts(head.root / "work" / "run") == [] and "is left out" not in output


def test_a_run_that_is_killed_leaves_no_process_on_other_machines_and_resumes(
    cluster: list[Machine], tmp_path: Path
) -> None:
    head, other = cluster
    started = start(head, "run", "--steps", "6", "--placement.cpus", "1", *servers(tmp_path))
    wait_for("step 3/6", head, "run", started)
    assert any(map(of_run, other.processes))
    started.kill()
    started.wait()
    end = time.monotonic() + SECONDS
    while left := [command for pid in other.processes if (command := of_run(pid))]:
        assert time.monotonic() < end, left
        time.sleep(0.5)
    resume = [sys.executable, "-m", "agent_r1", "train", "--run", str(head.work / "run"), "--resume"]
    output = finish(head, "run", head.start(resume, ENVIRONMENT, head.root / "run.log"))
    assert "step 6/6" in output


def of_run(pid: int) -> str | None:
    """Return the command of a process that is a server or an actor of the run; None for a process of Ray itself."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return command if "fake_vllm" in command or command.startswith(("ray::RankActor", "ray::ServerActor")) else None


def test_servers_on_another_machine_get_adapters(cluster: list[Machine], tmp_path: Path) -> None:
    head, _ = cluster
    lora = ("--trainer.lora.rank", "4", "--trainer.ranks", "1", "--placement.cpus", "1")
    output = finish(head, "run", start(head, "run", "--steps", "4", *lora, *servers(tmp_path)))
    assert "is left out" not in output
    with closing(RunReader(head.root / "work" / "run")) as reader:
        versions = {s.version for t in reader.trajectories() for turn in t.turns for s in turn.version_spans}
    assert versions == {0, 1, 2, 3}


def test_what_no_machine_has_is_refused_with_both_numbers(cluster: list[Machine]) -> None:
    head, _ = cluster
    assert start(head, "never", "--steps", "3", "--placement.cpus", "3").wait(SECONDS) == 2
    output = (head.root / "never.log").read_text("utf-8")
    assert "got 6 CPU cores for 2 ranks; give fewer trainer.ranks" in output
    assert not (head.root / "work" / "never").exists()
