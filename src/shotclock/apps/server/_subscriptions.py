"""Clients that want to know when a resource or a list changes, and the notifications to them.

A client of the 2026 revision keeps a stream open (`subscriptions/listen`). An older one subscribes to single resources,
and is informed of every change of a list. A function reports a change of a resource with `ctx.resource_updated(uri)`;
lists change when the program is reloaded. Neither waits for slow readers: a client has at most one unsent notification
of each resource or list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    EmptyResult,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    SubscriptionsListenResult,
    UnsubscribeRequestParams,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ._listing import Context

MOST_SUBSCRIPTIONS = 1_000  # of one older client
MOST_STREAMS = 1_000
SENT_WITHIN_S = 10.0  # a client that does not read for so long misses the notification


Send = Callable[[Connection], Awaitable[None]]
ListChanged = ToolsListChanged | ResourcesListChanged | PromptsListChanged
_METHODS: dict[type[ListChanged], str] = {
    ToolsListChanged: "notifications/tools/list_changed",
    ResourcesListChanged: "notifications/resources/list_changed",
    PromptsListChanged: "notifications/prompts/list_changed",
}


class Subscriptions:
    def __init__(self, *, reloads: bool = False) -> None:
        self._reloads = reloads
        self._bus = InMemorySubscriptionBus()
        self._listening = ListenHandler(self._bus, max_subscriptions=MOST_STREAMS)
        self._subscribed: dict[Connection, set[str]] = {}
        self._older: set[Connection] = set()
        """Of clients that are informed of changed lists."""
        self._unsent: dict[tuple[Connection, str], asyncio.Task[None]] = {}
        """By the connection, and the resource or the method of the notification."""

    def offer(self, server: Server[Any], check: Callable[[Context, str], object]) -> None:
        """Add the requests to a server. `check` raises MCPError for a URI of which there is no resource."""

        async def subscribe(ctx: Context, params: SubscribeRequestParams) -> EmptyResult:
            uri, connection = str(params.uri), _connection_of(ctx)
            check(ctx, uri)
            if connection not in self._subscribed:
                self._subscribed[connection] = set()
                connection.exit_stack.callback(self._subscribed.pop, connection, None)
            uris = self._subscribed[connection]
            if len(uris) >= MOST_SUBSCRIPTIONS and uri not in uris:
                raise MCPError(code=INVALID_PARAMS, message=f"a client has {MOST_SUBSCRIPTIONS} subscriptions at most")
            uris.add(uri)
            return EmptyResult()

        async def unsubscribe(ctx: Context, params: UnsubscribeRequestParams) -> EmptyResult:
            self._subscribed.get(_connection_of(ctx), set()).discard(str(params.uri))
            return EmptyResult()

        server.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribe)
        server.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, unsubscribe)
        server.add_request_handler("subscriptions/listen", SubscriptionsListenRequestParams, self._listen)

    async def _listen(self, ctx: Context, params: SubscriptionsListenRequestParams) -> SubscriptionsListenResult:
        if not self._reloads:  # the acknowledgement names the lists that can change: none
            none = {"tools_list_changed": None, "resources_list_changed": None, "prompts_list_changed": None}
            params = params.model_copy(update={"notifications": params.notifications.model_copy(update=none)})
        return await self._listening(ctx, params)

    async def notice_client(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Note an older client, whose lists may change: a middleware of servers that can be reloaded."""
        if ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            connection = _connection_of(ctx)
            if connection not in self._older:
                self._older.add(connection)
                connection.exit_stack.callback(self._older.discard, connection)
        return await call_next(ctx)

    async def list_changed(self, change: ListChanged) -> None:
        """Notify all clients of older revisions, and the others that listen."""
        method = _METHODS[type(change)]
        for connection in self._older:
            if connection.initialized.is_set():
                self._begin_send(connection, method, lambda to: to.notify(method, None))
        await self._bus.publish(change)

    async def resource_updated(self, uri: str) -> None:
        """Notify the clients that listen to a resource."""
        for connection, uris in self._subscribed.items():
            if uri in uris:
                self._begin_send(connection, uri, lambda to: to.send_resource_updated(uri))
        await self._bus.publish(ResourceUpdated(uri=uri))

    def _begin_send(self, to: Connection, what: str, send: Send) -> None:
        if (to, what) not in self._unsent:
            self._unsent[to, what] = asyncio.get_running_loop().create_task(self._send(to, what, send))

    async def _send(self, to: Connection, what: str, send: Send) -> None:
        try:
            with suppress(Exception):  # the client has left, or does not read
                async with asyncio.timeout(SENT_WITHIN_S):
                    await send(to)
        finally:
            del self._unsent[to, what]

    def close(self) -> None:
        """End the streams."""
        self._listening.close()
        for sending in self._unsent.values():
            sending.cancel()


def _connection_of(ctx: Context) -> Connection:
    """Return the connection of a request. The SDK has no public name for it; every request has a session of its own."""
    return ctx.session._connection
