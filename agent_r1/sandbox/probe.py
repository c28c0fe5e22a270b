"""Attack each isolation layer of the sandbox in a test, to verify that the layer works on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox.cgroup import clear_stale_cgroups
from agent_r1.sandbox.config import Limits, SandboxConfig
from agent_r1.sandbox.isolation import ALL_LAYERS, Confinement, IsolationLayer
from agent_r1.sandbox.process import run_program
from agent_r1.sandbox.syscalls import pyseccomp

_SOURCE = (Path(__file__).parent / "inside" / "probe.py").read_text()
_LIMITS = Limits(seconds=10, memory=128 * 2**20, processes=8, disk=2**20, open_files=32)


def verify_isolation(config: SandboxConfig) -> frozenset[IsolationLayer]:
    """Test the isolation layers on this machine, and return the layers that work.

    Only the cgroup layer may fail. A successful test is not repeated in the same process. For the level ``none``, no
    layer is tested, and the result is empty.

    Raises:
        InvalidInput: a program or a package is missing, a folder in ``config.packages`` does not exist, or a layer
            other than the cgroup does not work.
    """
    for folder in config.packages:
        if not folder.is_dir():
            raise InvalidInput("packages of the sandbox", got=f"{folder}, which is no folder", do="give folders")
    return frozenset() if config.level == "none" else _verify_machine()


@lru_cache(maxsize=1)
def _verify_machine() -> frozenset[IsolationLayer]:
    if sys.platform != "linux":
        raise refusal(f"{sys.platform}", "use Linux")
    if shutil.which("bwrap") is None:
        raise refusal("no program bwrap", "install bubblewrap (apt-get install bubblewrap)")
    if pyseccomp is None:
        raise refusal("no pyseccomp", "pip install 'agent-r1[sandbox]', and apt-get install libseccomp2")
    clear_stale_cgroups()
    with ThreadPoolExecutor(1) as thread:  # in a thread, because the caller can be inside an event loop
        broken = thread.submit(asyncio.run, find_broken_layers(ALL_LAYERS)).result()
    if required := broken - {IsolationLayer.CGROUP}:
        names = ", ".join(sorted(required))
        raise refusal(f"one that does not hold here: {names}", 'see docs/sandbox.md, "When it refuses"')
    return ALL_LAYERS - broken


def refusal(got: str, do: str) -> InvalidInput:
    accept = "or accept the risk with --sandbox none (in Python: SandboxConfig(level='none'))"
    return InvalidInput("sandbox 'bubblewrap'", got=got, do=f"{do}, {accept}")


async def find_broken_layers(layers: frozenset[IsolationLayer]) -> frozenset[IsolationLayer]:
    """Attack every isolation layer from a process that is isolated by ``layers``. Return the broken layers.

    All members of :class:`IsolationLayer` are attacked, also members that are not in ``layers``. A layer is broken if
    the attack succeeds.

    Raise InvalidInput if the probe does not run to its end.
    """
    with tempfile.TemporaryDirectory(prefix="agent-r1-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)  # so that only the layer, not a file permission, protects the secret
        secret = Path(folder, "secret")
        secret.write_text("secret")
        targets = _LIMITS.model_dump() | {"secret": str(secret), "port": server.getsockname()[1]}
        result = await run_program(Confinement(layers, _LIMITS), f"{_SOURCE}\nprobe({targets!r})")
    lines = dict(line.split() for line in result.stdout.text.splitlines())
    # The line of the cgroup can be missing: the kernel can kill the process in the attempt against the cgroup.
    for layer in ALL_LAYERS - {IsolationLayer.CGROUP}:
        if layer not in lines:
            reason = result.error.strip().splitlines()[-1:] or [result.status]
            raise refusal(f"a probe that did not complete: {reason[0]}", 'see docs/sandbox.md, "When it refuses"')
    return frozenset(layer for layer in ALL_LAYERS if lines.get(layer) == "broken")
