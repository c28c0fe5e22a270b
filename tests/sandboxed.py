"""Provide a sandbox of the default level for tests."""

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Limits, Sandbox, SandboxConfig


def sandbox_or_skip(limits: Limits) -> Sandbox:
    """Return a sandbox. Skip the test if this machine cannot run one, but fail if a layer does not hold."""
    try:
        return Sandbox(SandboxConfig(limits=limits))
    except InvalidInput as refusal:
        if "does not hold" in str(refusal):
            raise
        pytest.skip(str(refusal))
