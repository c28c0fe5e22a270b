"""An MCP server for tests, over stdio, or over HTTP if a port is given."""

import base64
import io
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp_types import ImageContent

server = MCPServer("tests")
counted = {"calls": 0}


@server.tool()
def count() -> int:
    """Count the calls of this server."""
    counted["calls"] += 1
    return counted["calls"]


@server.tool()
def add(a: int, b: int = 1) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


@server.tool()
def raises() -> str:
    """Raise."""
    raise ValueError("no such page")


@server.tool()
def dies() -> str:
    """End the server."""
    print("out of memory\n    ^^^^^^\n\u2570\u2500\u2500\u256f\n}", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hangs() -> str:
    """Never answer."""
    time.sleep(1000)
    return ""


@server.tool()
def floods() -> str:
    """Answer with a megabyte."""
    return "x" * 1_000_000


@server.tool(name="the.environment")
def environment() -> dict[str, str]:
    """Return the process id and the seed."""
    return {"pid": str(os.getpid()), "seed": os.environ.get("AGENT_R1_SEED", "none")}


@server.tool()
def picture() -> list[Image | ImageContent]:
    """Show a picture twice, the second time without its type."""
    return [
        Image(data=png(), format="png"),
        ImageContent(type="image", data=base64.b64encode(png()).decode(), mime_type=""),
    ]


@server.tool()
def numbers(which: list[int]) -> list[int]:
    """Return a list."""
    return which


@server.tool()
def say(text: str) -> str:
    """Return a text."""
    return text


@server.tool()
def forged() -> Image:
    """Show half of a picture."""
    return Image(data=png()[:20], format="png")


def png() -> bytes:
    from PIL import Image as Pillow  # slow to import, and most servers show no picture

    file = io.BytesIO()
    Pillow.new("RGB", (6, 4), "red").save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
