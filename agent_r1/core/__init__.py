"""Values and protocols that all other subpackages share. This subpackage imports only the standard library."""

from agent_r1.core.attempt_id import AttemptId
from agent_r1.core.environment import Env, Episode, ModelClient, RolloutContext, Transition
from agent_r1.core.errors import AgentR1Error, EngineError, Interrupted, InvalidInput, RunStopped, UnsupportedChat
from agent_r1.core.inference import (
    Capabilities,
    Completion,
    InferenceEngine,
    PolicyVersionSpan,
    Prompt,
    PromptMedia,
    SamplingParams,
    ScoredTokens,
    StopCondition,
    ValueFunction,
)
from agent_r1.core.messages import Action, Image, Message, Text, ToolCall
from agent_r1.core.reference_solution import ReferenceSolution, ReferenceSolutions, script, tool_call
from agent_r1.core.task import Task
from agent_r1.core.taskset import TaskSet
from agent_r1.core.tool import ToolResult, ToolSpec
from agent_r1.core.trajectory import Group, Scorer, Status, Trajectory, Turn, Unscored
from agent_r1.core.weights import PolicyVersion, WeightUpdate

__all__ = [
    "Action",
    "AgentR1Error",
    "AttemptId",
    "Capabilities",
    "Completion",
    "EngineError",
    "Env",
    "Episode",
    "Group",
    "Image",
    "InferenceEngine",
    "Interrupted",
    "InvalidInput",
    "Message",
    "ModelClient",
    "PolicyVersion",
    "PolicyVersionSpan",
    "Prompt",
    "PromptMedia",
    "ReferenceSolution",
    "ReferenceSolutions",
    "RolloutContext",
    "RunStopped",
    "SamplingParams",
    "ScoredTokens",
    "Scorer",
    "Status",
    "StopCondition",
    "Task",
    "TaskSet",
    "Text",
    "ToolCall",
    "ToolResult",
    "ToolSpec",
    "Trajectory",
    "Transition",
    "Turn",
    "Unscored",
    "UnsupportedChat",
    "ValueFunction",
    "WeightUpdate",
    "script",
    "tool_call",
]
