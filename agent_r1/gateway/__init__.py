"""The gateway: an HTTP endpoint for agents, in the dialects of OpenAI and Anthropic.

The policy of a run or a served model answers the requests. A name of this package is imported when it is first used. So
an import of ``agent_r1.gateway.config`` does not load a server.
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
