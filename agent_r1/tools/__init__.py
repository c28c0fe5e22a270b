"""Tools: typed Python functions that an agent can call, the validation and execution of calls, and MCP servers."""
