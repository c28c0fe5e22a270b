"""The sandbox limits the memory of all its processes on every machine that permits this."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_r1.sandbox.isolation import IsolationLayer
from agent_r1.sandbox.sandbox import Sandbox

LIMITS = {"memory": ("memory", "memory.limit_in_bytes"), "": (".", "memory.max")}
"""The folder and the file of the limit, by the controllers that /proc/self/cgroup names, for versions 1 and 2."""


def can_limit_memory() -> bool:
    """Return whether this process may make a cgroup with a memory limit, tried without the package's own code."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines()]
    for folder, file, group in ((*LIMITS[names], group) for _, names, group in lines if names in LIMITS):
        child = Path("/sys/fs/cgroup", folder, group.lstrip("/"), f"cgroup-test-{os.getpid()}")
        try:
            child.mkdir()
        except OSError:
            continue
        try:
            if (child / file).exists():
                (child / file).write_text(f"{2**28}", "utf-8")
                return True
        except OSError:
            continue
        finally:
            child.rmdir()
    return False


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="no /proc/self/cgroup")
def test_memory_is_limited_together_if_and_only_if_the_machine_permits_it(sandbox: Sandbox) -> None:
    assert (IsolationLayer.CGROUP in sandbox.isolation) == can_limit_memory()
