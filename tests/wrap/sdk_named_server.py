"""An MCP server of the SDK with a name, for clients of both generations that use several servers."""

import sys

from mcp.server.mcpserver import Context, MCPServer

name = sys.argv[1]
server = MCPServer(name, instructions=f"Use {name}.")


@server.tool()
def who(n: int) -> str:
    """Return the name of the server."""
    return f"{name} {n}"


@server.tool()
async def change(ctx: Context) -> str:
    """Announce other tools."""
    await ctx.notify_tools_changed()
    return "announced"


@server.tool()
async def slow(ctx: Context) -> str:
    """Report progress."""
    await ctx.report_progress(1, 2, name)
    return name


@server.prompt()
def greet() -> str:
    """Greet."""
    return f"Hello from {name}"


@server.resource(f"{name}://text")
def text() -> str:
    """Return a text."""
    return f"text of {name}"


if __name__ == "__main__":
    server.run("stdio")
