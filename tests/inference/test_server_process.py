"""A server in a process group of its own: what is left of it after its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.inference.server_process import ServerProcess

SHARED_MEMORY = Path("/dev/shm")

SERVER = """
import time
from multiprocessing import get_context, shared_memory

def work():
    segment = shared_memory.SharedMemory(create=True, size=4096)
    print(segment.name, flush=True)
    time.sleep(600)

if __name__ == "__main__":
    segment = shared_memory.SharedMemory(create=True, size=4096)
    print(segment.name, flush=True)
    get_context("spawn").Process(target=work).start()
    time.sleep(600)
"""

DRIVER = """
import sys, time
from pathlib import Path
from agent_r1.inference.server_process import ServerProcess

server = ServerProcess([sys.executable, sys.argv[1]], {}, Path(sys.argv[2]))
time.sleep(600)
"""


@pytest.fixture
def server_file(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER, "utf-8")
    return file


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    log = tmp_path / "log"
    yield log
    for name in log.read_text("utf-8").split():
        if name.startswith("psm_"):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def segments(log: Path) -> list[Path]:
    """Wait until both processes of the server have their segment, and return the files of the segments."""
    while not log.exists() or log.read_text("utf-8").count("psm_") < 2:
        time.sleep(0.02)
    found = [SHARED_MEMORY / name for name in log.read_text("utf-8").split()]
    assert all(file.exists() for file in found)
    return found


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="shared memory is in /dev/shm")
@pytest.mark.parametrize("end", ["stop", "kill", "crash"])
def test_a_server_leaves_no_shared_memory(end: str, server_file: Path, log: Path) -> None:
    server = ServerProcess([sys.executable, str(server_file)], {}, log)
    files = segments(log)
    if end == "kill":
        server.kill()
    if end == "crash":
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text("utf-8")
        os.kill(int(children.split()[0]), signal.SIGKILL)
        while server.is_running:
            time.sleep(0.02)
        assert server.last_words().startswith("psm_")
    server.stop()
    assert [file for file in files if file.exists()] == []


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="shared memory is in /dev/shm")
def test_a_killed_run_leaves_no_shared_memory_of_its_server(server_file: Path, log: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(server_file), str(log)])
    files = segments(log)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 60
    while any(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)
