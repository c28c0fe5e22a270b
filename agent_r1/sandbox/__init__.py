"""Where code that a model wrote runs: a container without network, made anew in milliseconds. See docs/sandbox.md."""

from agent_r1.sandbox.config import Limits, SandboxConfig, SandboxLevel
from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus, Output, Verdict
from agent_r1.sandbox.sandbox import Sandbox, find_unconfined_sandbox, sandbox_level, validate_sandbox

__all__ = [
    "ExecutionStatus",
    "Interpreter",
    "SandboxLevel",
    "Limits",
    "ExecutionResult",
    "Output",
    "Sandbox",
    "SandboxConfig",
    "Verdict",
    "validate_sandbox",
    "sandbox_level",
    "find_unconfined_sandbox",
]
