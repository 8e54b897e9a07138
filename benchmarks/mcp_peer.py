"""The peer's side of the MCP benchmarks: the same tools on FastMCP. `python -m benchmarks.mcp_peer [PORT]`."""

from __future__ import annotations

import sys
import time

from fastmcp import FastMCP

from .mcp_app import HANGS_S

server = FastMCP("bench")


@server.tool
def noop(a: int) -> int:
    return a


@server.tool
async def noop_async(a: int) -> int:
    return a


@server.tool(timeout=1.0)
def hang() -> None:
    time.sleep(HANGS_S)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="http", host="127.0.0.1", port=int(sys.argv[1]), show_banner=False, log_level="CRITICAL")
    else:
        server.run(show_banner=False, log_level="CRITICAL")
