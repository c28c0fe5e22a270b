"""Tools: typed Python functions that an agent can call, how calls are validated and executed, and MCP servers."""

from agent_r1.tools.function_tool import Tool, tool
from agent_r1.tools.python_tool import python_tool
from agent_r1.tools.resources import Opener, Resources
from agent_r1.tools.tool_errors import INVALID_CALL_KINDS, ToolErrorKind

__all__ = ["INVALID_CALL_KINDS", "ToolErrorKind", "Opener", "Resources", "Tool", "python_tool", "tool"]
