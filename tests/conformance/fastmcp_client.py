"""FastMCP's client: `fastmcp_client.py PLAN`, with a plan as in sdk_client.py.

Started as a program, with the interpreter of an environment that has FastMCP. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from fastmcp import Client
from fastmcp.client.transports import StdioTransport
from mcp_types import PromptReference

TIMEOUT_S = 60.0


def plain(value: Any) -> Any:
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


async def take(client: Client[Any], step: list[Any]) -> Any:
    match step:
        case ["tools"]:
            return plain(await client.list_tools_mcp())
        case ["call", name, arguments]:
            result = await client.call_tool(name, arguments, raise_on_error=False)
            content = [plain(block) for block in result.content]
            return {"content": content, "isError": result.is_error, "value": result.data}
        case ["prompt", name, arguments]:
            return plain(await client.get_prompt(name, arguments))
        case ["read", uri]:
            return {"contents": [plain(each) for each in await client.read_resource(uri)]}
        case ["complete", name, argument, value]:
            reference = PromptReference(name=name)
            completion = await client.complete(reference, {"name": argument, "value": value})
            return {"completion": plain(completion)}
        case _:
            raise AssertionError(f"unknown step {step}")


async def main(plan: dict[str, Any]) -> None:
    first, *rest = plan["command"]
    is_url = first.startswith("http://")
    transport: Any = first if is_url else StdioTransport(first, rest, env=dict(os.environ), keep_alive=False)
    async with Client(transport, timeout=TIMEOUT_S) as client:
        print(json.dumps({"answers": [await take(client, step) for step in plan["steps"]]}))


asyncio.run(main(json.loads(sys.argv[1])))
