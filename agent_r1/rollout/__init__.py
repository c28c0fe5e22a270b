"""Rollouts: sessions, which make turns; the agent loop and other rollouts; context policies; and the collector.

Each name is imported on first use, so that ``agent_r1.rollout.config`` does not load torch.
"""

from typing import TYPE_CHECKING

from agent_r1.core.lazy import lazy_names

if TYPE_CHECKING:
    from agent_r1.rollout.agent_loop import Agent, AgentLoop, chat_client
    from agent_r1.rollout.collector import Collector, GroupRequest, RolloutLimits
    from agent_r1.rollout.config import ContextPolicyConfig
    from agent_r1.rollout.context_policy import ContextPolicy, build_context_policy
    from agent_r1.rollout.multi_agent import play_game
    from agent_r1.rollout.scripted_agent import ScriptedAgent
    from agent_r1.rollout.scripted_engine import ScriptedEngine
    from agent_r1.rollout.session import Rollout, Session
    from agent_r1.rollout.session_values import Stopped
    from agent_r1.rollout.staleness import StalenessController

__all__ = [
    "Agent",
    "AgentLoop",
    "Collector",
    "ContextPolicy",
    "ContextPolicyConfig",
    "GroupRequest",
    "Rollout",
    "RolloutLimits",
    "ScriptedAgent",
    "ScriptedEngine",
    "Session",
    "StalenessController",
    "Stopped",
    "build_context_policy",
    "chat_client",
    "play_game",
]

__getattr__ = lazy_names(
    __name__,
    {
        "agent_loop": ("Agent", "AgentLoop", "chat_client"),
        "collector": ("Collector", "GroupRequest", "RolloutLimits"),
        "config": ("ContextPolicyConfig",),
        "context_policy": ("ContextPolicy", "build_context_policy"),
        "multi_agent": ("play_game",),
        "scripted_agent": ("ScriptedAgent",),
        "scripted_engine": ("ScriptedEngine",),
        "session": ("Rollout", "Session"),
        "session_values": ("Stopped",),
        "staleness": ("StalenessController",),
    },
)
