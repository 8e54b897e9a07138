"""The client that the MCP conformance suite starts: `suite_client.py [FRONT…] URL`.

Speaks HTTP to the URL, or stdio to the command FRONT with the URL at its end. It lists the tools and calls each one.
Where the suite looks at headers, it also reads the resources and the prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any

import mcp_types as types
from mcp import Client, StdioServerParameters
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

VALUES: dict[str, Any] = {"string": "x", "integer": 5, "number": 5, "boolean": False, "object": {}, "array": []}
NO_ANSWER_S = 25.0  # below the limit of the suite


async def elicit(context: Any, params: Any) -> types.ElicitResult:
    """Accept the defaults, and confirm."""
    content: dict[str, Any] = {}
    for name, schema in params.requested_schema.get("properties", {}).items():
        content[name] = schema.get("default", True if schema.get("type") == "boolean" else "x")
    return types.ElicitResult(action="accept", content=content)


async def sample(context: Any, params: Any) -> types.CreateMessageResult:
    content = types.TextContent(type="text", text="sampled")
    return types.CreateMessageResult(role="assistant", content=content, model="scripted")


async def list_roots(context: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[])


def calls(tools: list[types.Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that the suite asks for, or one of each tool with the arguments that it needs."""
    given = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}").get("toolCalls")
    if given:
        return [(call["name"], call.get("arguments", {})) for call in given]
    schemas = {tool.name: tool.input_schema for tool in tools}
    made = []
    for name, schema in schemas.items():
        properties = schema.get("properties", {})
        arguments = {each: VALUES.get(properties.get(each, {}).get("type"), "x") for each in schema.get("required", [])}
        if name == "json_schema_echo":
            arguments = {"schema": schemas["json_schema_2020_12_tool"]}
        made.append((name, arguments))
    return made


async def attempt(request: Awaitable[Any]) -> None:
    try:
        await request
    except Exception as error:
        print(repr(error), file=sys.stderr)


async def main(front: list[str], url: str) -> None:
    is_modern = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION") in MODERN_PROTOCOL_VERSIONS
    server: Any = url
    if front:
        server = StdioServerParameters(command=front[0], args=[*front[1:], url], env=dict(os.environ))
    async with Client(
        server,
        mode="auto" if is_modern else "legacy",
        read_timeout_seconds=NO_ANSWER_S,
        sampling_callback=sample,
        list_roots_callback=list_roots,
        elicitation_callback=elicit,
    ) as client:
        for name, arguments in calls((await client.list_tools()).tools):
            await attempt(client.call_tool(name, arguments))
        if os.environ.get("MCP_CONFORMANCE_SCENARIO") == "http-standard-headers":
            for resource in (await client.list_resources()).resources:
                await attempt(client.read_resource(str(resource.uri)))
            for prompt in (await client.list_prompts()).prompts:
                await attempt(client.get_prompt(prompt.name, {}))


asyncio.run(main(sys.argv[1:-1], sys.argv[-1]))
