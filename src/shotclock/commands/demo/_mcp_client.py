"""A client of MCP servers that is built on the official SDK: `mcp-client list|search -- SERVER…`.

`list` prints the tools as a model reads them. `search` calls that tool until it is answered, at most twice.
"""

import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from shotclock.supervise.clock import monotonic_ns

TRIES = 2
LONGEST = 70


async def search(session: ClientSession) -> None:
    for _ in range(TRIES):
        print("client: calls the tool search", flush=True)
        began_ns = monotonic_ns()
        result = await session.call_tool("search")
        text = next((each.text for each in result.content if each.type == "text"), "")
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
        took_s = (monotonic_ns() - began_ns) / 1e9
        print(f"client: {'error' if result.is_error else 'answer'} after {took_s:.1f}s: {text}", flush=True)
        if not result.is_error:
            break


async def show_tools(session: ClientSession) -> None:
    for tool in (await session.list_tools()).tools:
        print(f"model reads: {tool.name}: {tool.description}", flush=True)


async def main(what: str, command: list[str]) -> None:
    # The SDK passes few variables on by itself. The demo finds its processes by one of them.
    server = StdioServerParameters(command=command[0], args=command[1:], env=dict(os.environ))
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        await (show_tools(session) if what == "list" else search(session))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[3:]))
