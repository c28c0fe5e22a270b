"""Where code that a model wrote runs: a container without network, made anew in milliseconds. See docs/sandbox.md."""

from agent_r1.env.sandbox.config import Level, Limits, SandboxConfig
from agent_r1.env.sandbox.interpreter import Interpreter
from agent_r1.env.sandbox.outcome import Ended, Outcome, Output, Verdict
from agent_r1.env.sandbox.sandbox import Sandbox, declared, level_of, unconfined

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
