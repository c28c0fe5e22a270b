"""Isolated execution of code written by a model. By default, each program runs in a container without network."""

from agent_r1.sandbox.config import Limits, SandboxConfig, SandboxLevel
from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.result import ExecutionResult, ExecutionStatus, Output, Verdict
from agent_r1.sandbox.sandbox import Sandbox, find_unconfined_sandbox, sandbox_level, validate_sandbox

__all__ = [
    "ExecutionResult",
    "ExecutionStatus",
    "Interpreter",
    "Limits",
    "Output",
    "Sandbox",
    "SandboxConfig",
    "SandboxLevel",
    "Verdict",
    "find_unconfined_sandbox",
    "sandbox_level",
    "validate_sandbox",
]
