"""recipes/train.sbatch runs with programs that stand in for those of Slurm."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

from agent_r1.cli import parse
from agent_r1.config import resolve
from agent_r1.inference.vllm import SERVER_ENVIRONMENT, SERVER_OPTIONS
from agent_r1.training.config import TrainConfig

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.sbatch"
PROGRAMS = {
    "scontrol": """
if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "scontrol $*" >> "$LOG"; fi
""",
    "srun": """
echo "srun $*" >> "$LOG"
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = env ]; then exec sleep 600; fi  # a server
exec "$@"
""",
    "curl": "exit 0",
    "agent-r1": """
trap "exit 143" TERM
echo "agent-r1 $*" >> "$LOG"
touch "$LOG.ready"
for i in {1..6000}; do sleep 0.05; done
""",
}


def test_a_job_starts_servers_on_the_other_nodes_and_is_queued_again_after_a_signal(tmp_path: Path) -> None:
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.read_text("utf-8").replace("gpus_per_server=1 ", "gpus_per_server=4 "), "utf-8")
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "run.db").touch()
    log = tmp_path / "log"
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
    environment = {**os.environ, **given, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    command = ["bash", str(script), "--trainer.ranks", "8"]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        while not Path(f"{log}.ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    lines = log.read_text("utf-8").splitlines()
    servers = [line for line in lines if "vllm.entrypoints" in line]
    assert sorted(line.partition("--host ")[2] for line in servers) == [
        f"n{node} --port {port}" for node in (2, 3) for port in (8100, 8104)
    ]
    assert all(" ".join(SERVER_OPTIONS) in line for line in servers)
    assert all(f"{name}={value} " in line for line in servers for name, value in SERVER_ENVIRONMENT.items())
    assert sum("CUDA_VISIBLE_DEVICES=4,5,6,7" in line for line in servers) == 2
    (training,) = (line for line in lines if line.startswith("agent-r1 "))
    config = resolve(TrainConfig, [parse(shlex.split(training)[1:])[1]["settings"]])
    urls = tuple(f"http://n{node}:{port}" for node in (2, 3) for port in (8100, 8104))
    assert (config.run, config.trainer.ranks, config.engine.vllm.urls) == ("runs/big", 8, urls)
    assert training.endswith(" --resume") and lines[-1] == "scontrol requeue 7"
