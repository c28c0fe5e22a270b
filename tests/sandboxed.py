"""Provide a sandbox of the default level for tests."""

import importlib
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest

from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.sandbox import Sandbox

PRIVILEGES = ("--ro-bind", "/", "/", "--size", "1048576", "--tmpfs", "/tmp", "--unshare-net", "--unshare-pid")


def sandbox_or_skip(limits: Limits) -> Sandbox:
    """Return a sandbox. Skip the test if the machine lacks a requirement of the sandbox.

    The requirements are looked up without the package's own code. So a test fails if a machine with all requirements
    cannot run a sandbox.
    """
    reason = find_missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    return Sandbox(SandboxConfig(limits=limits))


@cache
def find_missing_requirement() -> str | None:
    """Return a requirement of the sandbox that this machine lacks, or None if the machine lacks none."""
    if sys.platform != "linux":
        return "the sandbox needs Linux"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    try:
        importlib.import_module("pyseccomp")
    except (ImportError, OSError, RuntimeError) as error:
        return f"pyseccomp or libseccomp is not installed (extra sandbox; apt-get install libseccomp2): {error}"
    options = PRIVILEGES if os.geteuid() == 0 else (*PRIVILEGES, "--unshare-user", "--disable-userns")
    tried = subprocess.run(["bwrap", *options, "true"], capture_output=True, encoding="utf-8")
    return f"bubblewrap cannot isolate a program here: {tried.stderr.strip()}" if tried.returncode else None
