"""An MCP server of the SDK over streamable HTTP, for clients of both generations. Prints its port."""

import asyncio
import os
import socket
import sys
from typing import Annotated

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import SamplingMessage, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

server = MCPServer("remote")
cancelled: list[str] = []


class Colour(BaseModel):
    colour: str


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """Return the process of the server."""
    return os.getpid()


@server.tool()
async def hang() -> str:
    """Never return."""
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.append("hang")
    return ""


@server.tool()
def count_cancelled() -> int:
    """Return how many calls were cancelled."""
    return len(cancelled)


@server.tool()
async def steps(ctx: Context, count: int) -> str:
    """Report progress."""
    for number in range(count):
        await ctx.report_progress(number + 1, count)
    return "done"


@server.tool()
async def ask_model(ctx: Context) -> str:
    """Ask the model of the client."""
    question = SamplingMessage(role="user", content=TextContent(type="text", text="2 + 2"))
    answer = await ctx.session.create_message(messages=[question], max_tokens=10)
    return answer.content.text  # type: ignore[union-attr]


@server.tool()
async def ask_person(ctx: Context) -> str:
    """Ask the person at the client."""
    answer = await ctx.elicit("Which colour?", Colour)
    return answer.data.colour  # type: ignore[union-attr]


@server.tool()
async def announce_until_heard(ctx: Context) -> str:
    """Announce other tools, again and again: the client may not listen yet."""
    while True:
        await ctx.session.send_tool_list_changed()
        await asyncio.sleep(0.1)


@server.tool()
async def publish(ctx: Context) -> str:
    """Announce other tools to subscribers."""
    await ctx.notify_tools_changed()
    return "published"


@server.tool()
def route(region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})]) -> str:
    """Repeat an argument that has to be in a header as well."""
    return region


def main() -> None:
    app = server.streamable_http_app(json_response="--json" in sys.argv)
    listening = socket.socket(proto=socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(sys.argv[1])))
    listening.listen(256)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
