"""An MCP server of the SDK whose tools report, log and ask the client."""

import asyncio

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import SamplingMessage, TextContent
from pydantic import BaseModel

server = MCPServer("asking")


class Name(BaseModel):
    name: str


@server.tool()
async def report(steps: int, ctx: Context) -> str:
    """Report progress and log."""
    for step in range(steps):
        await ctx.report_progress(step, steps)
        await ctx.info(f"step {step}")
    return f"{steps} steps"


@server.tool()
async def sample(ctx: Context) -> str:
    """Ask the client's model."""
    question = SamplingMessage(role="user", content=TextContent(type="text", text="question"))
    answer = await ctx.session.create_message([question], max_tokens=10)
    return str(answer.content.text)  # type: ignore[union-attr]


@server.tool()
async def elicit(ctx: Context) -> str:
    """Ask the person before the client."""
    answer = await ctx.elicit("your name", Name)
    return answer.model_dump_json()


@server.tool()
async def change(ctx: Context) -> str:
    """Announce a change to those who listen."""
    await ctx.notify_tools_changed()
    return "changed"


@server.tool()
async def wait(seconds: float) -> str:
    """Return later."""
    await asyncio.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    server.run("stdio")
