"""What the SDK serves: the tools of a desk, every call through the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp.server.lowlevel import Server
from mcp_types import ListToolsResult

from ..dispatch.dispatcher import Dispatcher
from .tool_calls import ToolCallMiddleware
from .tools import headers_matter, tools_of


class McpServer:
    """The SDK's server over a desk; `middleware.counts` says how it goes."""

    def __init__(self, dispatcher: Dispatcher, operation_timeout_ms: int | None = None) -> None:
        catalogue = dispatcher.catalogue
        limit_ms = catalogue.operation_timeout_ms if operation_timeout_ms is None else operation_timeout_ms
        tools = tools_of(catalogue)
        listed = ListToolsResult(tools=list(tools.values()))
        with_headers = {name: tool.input_schema for name, tool in tools.items() if headers_matter(tool)}

        async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
            return listed

        self.dispatcher = dispatcher
        self.operation_timeout_ms = limit_ms
        self.sdk: Server[Any] = Server(
            catalogue.name,
            version=catalogue.version,
            instructions=catalogue.summary or None,
            on_list_tools=list_tools,
            get_tool_input_schema=with_headers.get,
        )
        self.middleware = ToolCallMiddleware(
            dispatcher, tools, operation_timeout_ms=limit_ms, server_info=self.sdk.server_info_stamp
        )
        self.sdk.middleware[:] = [self.middleware]

    def health(self) -> Mapping[str, object]:
        runtime, counts = self.dispatcher.runtime, self.middleware.counts
        return {
            "name": self.dispatcher.catalogue.name,
            "calls": counts.calls,
            "in_flight": counts.in_flight,
            "cancelled": counts.cancelled,
            "operation_timeouts": counts.backstop,
            "late": counts.late + runtime.counts.late,
            "abandoned": runtime.counts.abandoned,
            "orphans": len(runtime.orphans),
            "workers": runtime.worker_count,
        }
