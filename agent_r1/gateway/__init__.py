"""The gateway: an HTTP server through which agents call a model, with the APIs of OpenAI and Anthropic.

Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.gateway.agent_program import AgentHost, AgentProgram, AgentProgramEnv
    from agent_r1.gateway.config import GatewayConfig
    from agent_r1.gateway.served_model import ServedModel
    from agent_r1.gateway.server import Gateway

__all__ = ["AgentHost", "AgentProgram", "AgentProgramEnv", "Gateway", "GatewayConfig", "ServedModel"]

__getattr__ = lazy_names(
    __name__,
    {
        "agent_program": ("AgentHost", "AgentProgram", "AgentProgramEnv"),
        "config": ("GatewayConfig",),
        "served_model": ("ServedModel",),
        "server": ("Gateway",),
    },
)
