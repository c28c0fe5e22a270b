"""A sandbox of the default level, for tests."""

import pytest

from agent_r1.core.errors import InvalidInput
from agent_r1.sandbox import Limits, Sandbox, SandboxConfig


def sandbox_or_skip(limits: Limits) -> Sandbox:
    """Where this machine cannot have it the test is skipped, saying so; a hole is no excuse."""
    try:
        return Sandbox(SandboxConfig(limits=limits))
    except InvalidInput as refusal:
        if "does not hold" in str(refusal):
            raise
        pytest.skip(str(refusal))
