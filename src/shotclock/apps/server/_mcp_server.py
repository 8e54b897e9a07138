"""An MCP server of one App: its lists, and the calls of its functions. The program of the App can be replaced.

A call belongs to the program in which it began. `use` gives all later requests to another program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.subscriptions import PromptsListChanged, ResourcesListChanged, ToolsListChanged
from mcp_types import ListToolsResult, PaginatedRequestParams, ServerCapabilities, Tool

from ...calls.principal import Role
from ...core.catalogue import Catalogue
from ...core.envelope import CONTROLS_EXTENSION
from ...core.value_types import JsonObject
from ...dispatch.dispatcher import Dispatcher
from ._listing import Context, page_of
from ._resources import offer_prompts, offer_resources
from ._subscriptions import ListChanged
from ._tool_calls import Clients as Clients
from ._tool_calls import ToolCallMiddleware, principal_at
from ._tools import CONTROLS, ServerTools, tools_of


class SdkServer(Server[Any]):
    """The SDK's server. It announces changes of its lists only if there can be any."""

    def __init__(self, catalogue: Catalogue, *, reloads: bool) -> None:
        super().__init__(catalogue.name, version=catalogue.version, instructions=catalogue.summary or None)
        self.reloads = reloads

    def get_capabilities(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, JsonObject] | None = None,
        extensions: dict[str, JsonObject] | None = None,
        *,
        protocol_version: str | None = None,
    ) -> ServerCapabilities:
        found = super().get_capabilities(
            notification_options, experimental_capabilities, extensions, protocol_version=protocol_version
        )
        for each in (found.tools, found.resources, found.prompts):
            if each is not None:
                each.list_changed = self.reloads
        return found


class McpServer:
    def __init__(
        self,
        dispatcher: Dispatcher,
        operation_timeout_ms: int | None = None,
        own_tools: ServerTools | None = None,
        tools: Mapping[str, Tool] | None = None,
        *,
        clients: Clients | None = None,
    ) -> None:
        """Serve the commands of the dispatcher; with `own_tools`, these `tools` and no others."""
        self._limit_ms = operation_timeout_ms
        self._clients = clients or Clients()
        self.sdk: SdkServer = SdkServer(dispatcher.catalogue, reloads=self._clients.reloads)
        self.middleware: ToolCallMiddleware = self._serve(dispatcher, own_tools, tools)
        self.former: list[ToolCallMiddleware] = []
        """Of replaced programs, the oldest first, with the calls that began in them."""

    @property
    def dispatcher(self) -> Dispatcher:
        return self.middleware.dispatcher

    @property
    def operation_timeout_ms(self) -> int:
        catalogue = self.dispatcher.catalogue
        return catalogue.operation_timeout_ms if self._limit_ms is None else self._limit_ms

    async def use(self, dispatcher: Dispatcher) -> list[str]:
        """Serve the commands of another dispatcher from now on, and return the names of the lists that changed."""
        before = self.middleware
        self.middleware = self._serve(dispatcher, None, None)
        self.former.append(before)
        changed = _changed_lists(before, self.middleware)
        for each in changed.values():
            await self._clients.subscriptions.list_changed(each)
        return list(changed)

    def _serve(
        self, dispatcher: Dispatcher, own_tools: ServerTools | None, tools: Mapping[str, Tool] | None
    ) -> ToolCallMiddleware:
        catalogue, sdk, clients = dispatcher.catalogue, self.sdk, self._clients
        tools = tools_of(catalogue) if tools is None else tools
        everything = list(tools.values())
        commands = {spec.name for spec in catalogue.commands}
        controls = set() if own_tools is not None else {*CONTROLS} - commands
        without_controls = [tool for name, tool in tools.items() if name not in controls]
        schemas = {name: tool.input_schema for name, tool in tools.items()}

        async def list_tools(ctx: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
            shown = everything if _may_control(ctx) else without_controls
            page, cursor = page_of(shown, params, catalogue.list_page_size)
            return ListToolsResult(tools=page, next_cursor=cursor)

        middleware = ToolCallMiddleware(
            dispatcher,
            tools,
            operation_timeout_ms=catalogue.operation_timeout_ms if self._limit_ms is None else self._limit_ms,
            server_info=sdk.server_info_stamp,
            own_tools=own_tools,
            clients=clients,
        )
        sdk.add_request_handler("tools/list", PaginatedRequestParams, list_tools)
        sdk.get_tool_input_schema = schemas.get
        sdk.middleware[:] = [*([clients.subscriptions.notice_client] if sdk.reloads else []), middleware]
        if own_tools is None:
            clients.log_levels.offer(sdk)
        # A later program may have resources, prompts or tasks, and handlers cannot be removed.
        offer_resources(sdk, catalogue, middleware.serve, clients.subscriptions, always=sdk.reloads)
        offer_prompts(sdk, catalogue, middleware.serve, always=sdk.reloads)
        middleware.tasks.offer(sdk, always=sdk.reloads)
        return middleware

    def stop(self, signal_name: str) -> None:
        """Answer the calls that wait for a person or a job. Their runtimes stop and answer the others."""
        self._clients.subscriptions.close()
        for middleware in (self.middleware, *self.former):
            middleware.stop(signal_name)

    async def close_runtimes(self) -> None:
        await asyncio.gather(*(each.dispatcher.runtime.close() for each in (self.middleware, *self.former)))

    async def close_states(self) -> None:
        """Close the lifespans of the Apps. Their runtimes are closed next."""
        await asyncio.gather(*(each.dispatcher.runtime.close_states() for each in (self.middleware, *self.former)))

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


def _may_control(ctx: Context) -> bool:
    """Return whether the controls are of use to a client: to an operator, and to one that asks for them.

    A model has no use for them. Its client cancels calls by a message of the protocol.
    """
    capabilities = ctx.session.client_capabilities
    extensions = None if capabilities is None else capabilities.extensions
    return CONTROLS_EXTENSION in (extensions or {}) or principal_at(ctx.request).role is Role.OPERATOR


def _changed_lists(before: ToolCallMiddleware, after: ToolCallMiddleware) -> dict[str, ListChanged]:
    def served(catalogue: Catalogue, kind: str) -> list[object]:
        return [spec for spec in catalogue.served if spec.kind == kind]

    changed: dict[str, ListChanged] = {}
    if before.tools != after.tools:
        changed["tools"] = ToolsListChanged()
    was, now = before.dispatcher.catalogue, after.dispatcher.catalogue
    if served(was, "resource") != served(now, "resource"):
        changed["resources"] = ResourcesListChanged()
    if served(was, "prompt") != served(now, "prompt"):
        changed["prompts"] = PromptsListChanged()
    return changed
