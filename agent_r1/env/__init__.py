"""The world a user writes: tools, the environment that interprets calls to them, and rewards."""

from agent_r1.env.feedback import INVALID_CALLS, Fault
from agent_r1.env.naive_rag import NaiveRag
from agent_r1.env.python_tool import python_tool
from agent_r1.env.resources import Opener, Resources
from agent_r1.env.rewards import exact_match, f1, final_answer, gated_exact_match, sub_match
from agent_r1.env.scoring import FunctionScorer
from agent_r1.env.toolenv import ToolEnv
from agent_r1.env.tools import Tool, tool
from agent_r1.env.users import ModelUser, Reply, User, UserEnv

__all__ = [
    "INVALID_CALLS",
    "Fault",
    "FunctionScorer",
    "ModelUser",
    "NaiveRag",
    "Opener",
    "Reply",
    "Resources",
    "Tool",
    "ToolEnv",
    "User",
    "UserEnv",
    "exact_match",
    "f1",
    "final_answer",
    "gated_exact_match",
    "python_tool",
    "sub_match",
    "tool",
]
