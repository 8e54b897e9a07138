"""An agent of pydantic-ai: `agent_client.py PLAN`, with a plan as in sdk_client.py.

Its model follows the plan: it calls one tool after the other, and reports the text that it read for each. Started as a
program, with the interpreter of an environment that has pydantic-ai. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from fastmcp.client.transports import StdioTransport
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

TIMEOUT_S = 60.0


def read_by_model(part: Any) -> list[Any]:
    """Return the text and the other content of an answer, as pydantic-ai gives them to models."""
    if isinstance(part, ToolReturnPart):
        text, files = part.model_response_str_and_user_content()
        return [text, [getattr(each, "media_type", str(each)) for each in files]]
    return [part.model_response(), []]


async def main(plan: dict[str, Any]) -> None:
    calls = [(name, arguments) for kind, name, arguments in plan["steps"] if kind == "call"]
    offered: list[str] = []
    read: list[list[Any]] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        offered[:] = [tool.name for tool in info.function_tools]
        last = messages[-1]
        assert isinstance(last, ModelRequest)
        read.extend(read_by_model(part) for part in last.parts if isinstance(part, ToolReturnPart | RetryPromptPart))
        if len(read) == len(calls):
            return ModelResponse(parts=[TextPart("done")])
        name, arguments = calls[len(read)]
        return ModelResponse(parts=[ToolCallPart(name, arguments)])

    first, *rest = plan["command"]
    is_url = first.startswith("http://")
    transport: Any = first if is_url else StdioTransport(first, rest, env=dict(os.environ), keep_alive=False)
    agent = Agent(FunctionModel(model), toolsets=[MCPToolset(transport, read_timeout=TIMEOUT_S)])
    await agent.run("Follow the plan.")
    print(json.dumps({"tools": offered, "read": read}))


asyncio.run(main(json.loads(sys.argv[1])))
