"""Where code that a model wrote runs: a container without network, made anew in milliseconds. See docs/sandbox.md."""

from agent_r1.sandbox.config import Level, Limits, SandboxConfig
from agent_r1.sandbox.interpreter import Interpreter
from agent_r1.sandbox.outcome import Ended, Outcome, Output, Verdict
from agent_r1.sandbox.sandbox import Sandbox, declared, level_of, unconfined

__all__ = [
    "Ended",
    "Interpreter",
    "Level",
    "Limits",
    "Outcome",
    "Output",
    "Sandbox",
    "SandboxConfig",
    "Verdict",
    "declared",
    "level_of",
    "unconfined",
]
