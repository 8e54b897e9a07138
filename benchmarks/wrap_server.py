"""The server behind the proxies of the wrap benchmarks. `python -m benchmarks.wrap_server [proxy]`."""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("bench")


@server.tool()
async def noop_async(a: int) -> int:
    return a


def serve_proxy() -> None:
    """Serve the same tools through FastMCP's proxy."""
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    behind = StdioTransport(sys.executable, ["-m", "benchmarks.wrap_server"])
    create_proxy(behind, name="bench").run(show_banner=False, log_level="CRITICAL")


if __name__ == "__main__":
    serve_proxy() if sys.argv[1:] == ["proxy"] else server.run("stdio")
