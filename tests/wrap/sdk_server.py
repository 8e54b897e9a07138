"""An MCP server of the SDK, for clients of both generations of the protocol."""

import os

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("sdk")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """Return the process of the server."""
    return os.getpid()


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Never return."""
    import asyncio

    await asyncio.Event().wait()
    return ""


if __name__ == "__main__":
    server.run("stdio")
