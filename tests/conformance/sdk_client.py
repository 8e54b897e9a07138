"""A client of either generation of the Python SDK: `sdk_client.py PLAN`, with a plan as in `plans.py`.

Started as a program, with the interpreter of an environment that has the SDK. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp
from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

plan: dict[str, Any] = json.loads(sys.argv[1])
questions: list[Any] = []
notices: list[Any] = []


def plain(value: Any) -> Any:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


async def sample(context: Any, params: Any) -> Any:
    questions.append(["sampling", plain(params)])
    content = types.TextContent(type="text", text="sampled")
    return types.CreateMessageResult(role="assistant", content=content, model="scripted")


async def elicit(context: Any, params: Any) -> Any:
    questions.append(["elicitation", plain(params)])
    return types.ElicitResult(action="accept", content={"name": "Ada", "check": True})


async def list_roots(context: Any) -> Any:
    questions.append(["roots"])
    return types.ListRootsResult(roots=[{"uri": "file:///project", "name": "project"}])


async def notice(message: Any) -> None:
    if isinstance(message, Exception):
        notices.append(["exception", repr(message)])
    elif not hasattr(message, "respond"):  # the first generation also shows requests here
        notices.append(plain(message))


async def progress(value: float, total: float | None, message: str | None) -> None:
    notices.append(["progress", value, total, message])


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """Yield the client, and the server as it has introduced itself."""
    argv = plan["command"]
    is_url = argv[0].startswith("http://")
    server = argv[0] if is_url else StdioServerParameters(command=argv[0], args=argv[1:], env=dict(os.environ))
    options: dict[str, Any] = {"message_handler": notice}
    if plan["full"]:
        options |= {"sampling_callback": sample, "elicitation_callback": elicit, "list_roots_callback": list_roots}
    if hasattr(mcp, "Client"):
        async with mcp.Client(server, mode="auto", **options) as client:
            info = {"info": plain(client.server_info), "capabilities": plain(client.server_capabilities)}
            yield client, {**info, "revision": client.protocol_version, "instructions": client.instructions}
        return
    transport = streamable_http_client(server) if is_url else stdio_client(server)
    async with transport as streams, ClientSession(*streams[:2], **options) as session:
        yield session, plain(await session.initialize())


async def take(client: Any, step: list[Any]) -> Any:
    match step:
        case ["tools"]:
            return await client.list_tools()
        case ["prompts"]:
            return await client.list_prompts()
        case ["resources"]:
            return await client.list_resources()
        case ["templates"]:
            return await client.list_resource_templates()
        case ["call", name, arguments]:
            return await client.call_tool(name, arguments, progress_callback=progress)
        case ["prompt", name, arguments]:
            return await client.get_prompt(name, arguments)
        case ["read", uri]:
            return await client.read_resource(uri)
        case ["subscribe", uri]:
            return await client.subscribe_resource(uri)
        case ["complete", name, argument, value]:
            reference = types.PromptReference(type="ref/prompt", name=name)
            return await client.complete(reference, {"name": argument, "value": value})
        case ["level", level]:
            return await client.set_logging_level(level)
        case _:
            raise AssertionError(f"unknown step {step}")


async def main() -> None:
    answers = []
    async with connected() as (client, server):
        for step in plan["steps"]:
            try:
                answers.append(plain(await take(client, step)))
            except Exception as error:
                answers.append({"exception": f"{type(error).__name__}: {error}"})
    print(json.dumps({"server": server, "answers": answers, "questions": questions, "notices": notices}))


asyncio.run(main())
