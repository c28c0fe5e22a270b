"""An MCP server with one tool, over standard input and output, for docs/tools.md."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if __name__ == "__main__":
    server.run()
