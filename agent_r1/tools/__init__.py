"""Tools: typed Python functions that an agent can call, the validation and execution of calls, and MCP servers."""

from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.python_tool import python_tool
from agent_r1.tools.resources import Opener, Resources
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind

__all__ = ["INVALID_CALL_KINDS", "Opener", "Resources", "Tool", "ToolErrorKind", "python_tool", "tool"]
