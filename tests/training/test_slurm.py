"""`agent-r1 slurm`: the script runs with programs that stand in for those of Slurm; impossible jobs are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from agent_r1.cli import main

VLLM = "--engine.backend vllm --engine.vllm.python /opt/vllm/bin/python --engine.vllm.weights_folder /shared"
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
"""The programs that stand in for others, in bash."""


def script_of(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["slurm", *options.split(), "--", *words.split()]) == 0
    return capsys.readouterr().out


def test_a_job_starts_servers_on_the_other_nodes_and_is_queued_again_after_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--run big --model m --trainer.ranks 8 --trainer.lora.rank 20 {VLLM}"
    words += " --engine.vllm.arguments=--tensor-parallel-size=4"
    script = tmp_path / "job.sh"
    script.write_text(script_of("--nodes 3 --gpus_per_node 8 --sbatch --partition=gpu", words, capsys))
    assert "#SBATCH --nodes=3\n" in script.read_text() and "#SBATCH --partition=gpu\n" in script.read_text()
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "run.db").touch()
    log = tmp_path / "log"
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)}
    environment = {**os.environ, **given, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    job = subprocess.Popen(["bash", str(script)], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        while not Path(f"{log}.ready").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait() == 143
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    lines = log.read_text().splitlines()
    servers = [line for line in lines if "vllm.entrypoints" in line]
    assert sorted(line.partition("--host ")[2] for line in servers) == [
        f"n{node} --port {port}" for node in (2, 3) for port in (8100, 8101)
    ]
    assert all("--gpus-per-node=8" in line and "--model m " in line for line in servers)
    assert all("--enable-lora --max-lora-rank 32 " in line for line in servers)
    assert all("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 " in line for line in servers)
    assert sum("CUDA_VISIBLE_DEVICES=4,5,6,7" in line for line in servers) == 2
    urls = ",".join(f"http://n{node}:{port}" for node in (2, 3) for port in (8100, 8101))
    training = f"agent-r1 train {words} --resume --engine.vllm.python  --engine.replicas 1 --engine.vllm.urls {urls}"
    assert training in lines and lines[-1] == "scontrol requeue 7"


def test_a_job_of_one_node_leaves_the_servers_to_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--run small --trainer.ranks 2 --engine.backend vllm --engine.vllm.python python --engine.replicas 2"
    script = script_of("--gpus_per_node 4", words, capsys)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "vllm.entrypoints" not in script and f"agent-r1 train {words} " in script


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ("", "", "run: got nothing; name it"),
        ("--gpus_per_node 4", "--run r --trainer.ranks 5", "trainer.ranks: got 5; give at most 4"),
        ("--nodes 2", "--run r", "nodes: got 2; give 1, or --engine.backend vllm"),
        ("--nodes 2", f"--run r {VLLM}", "nodes: got 2; give --model"),
        ("--nodes 2", f"--run r --model m {VLLM} --trainer.ranks 2", "trainer.ranks: got 2; give at most 1"),
        ("--nodes 2", f"--run r --model m {VLLM} --engine.vllm.arguments=-tp=2", "a server takes 2 GPUs"),
        ("--nodes 2", f"--run r --model m {VLLM.rpartition(' --')[0]}", "a folder that all nodes mount"),
        ("", "--run r --steps many", "steps"),
    ],
)
def test_a_job_that_cannot_run_is_refused(
    options: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", *options.split(), "--", *words.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and len(printed.err.splitlines()) == 1
