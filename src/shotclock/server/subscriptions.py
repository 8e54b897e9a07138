"""Clients that want to know when a resource changes, and the notifications to them.

A client of the 2026 revision keeps a stream open (`subscriptions/listen`), an older one subscribes to single resources.
A function reports a change with `ctx.resource_updated(uri)`. Its call does not wait for slow readers: a client has at
most one unsent notification of a resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mcp.server.connection import Connection
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ResourceUpdated
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    EmptyResult,
    SubscribeRequestParams,
    SubscriptionsListenRequestParams,
    UnsubscribeRequestParams,
)

from .listing import Context

MOST_SUBSCRIPTIONS = 1_000  # of one older client
MOST_STREAMS = 1_000
SENT_WITHIN_S = 10.0  # a client that does not read for so long misses the notification


class Subscriptions:
    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self._listening = ListenHandler(self._bus, max_subscriptions=MOST_STREAMS)
        self._subscribed: dict[Connection, set[str]] = {}
        self._unsent: dict[tuple[Connection, str], asyncio.Task[None]] = {}

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
        server.add_request_handler("subscriptions/listen", SubscriptionsListenRequestParams, self._listening)

    async def resource_updated(self, uri: str) -> None:
        """Notify the clients that listen to a resource."""
        for connection, uris in self._subscribed.items():
            key = (connection, uri)
            if uri in uris and key not in self._unsent:
                self._unsent[key] = asyncio.get_running_loop().create_task(self._send(key))
        await self._bus.publish(ResourceUpdated(uri=uri))

    async def _send(self, key: tuple[Connection, str]) -> None:
        connection, uri = key
        try:
            with suppress(Exception):  # the client has left, or does not read
                async with asyncio.timeout(SENT_WITHIN_S):
                    await connection.send_resource_updated(uri)
        finally:
            del self._unsent[key]

    def close(self) -> None:
        """End the streams."""
        self._listening.close()
        for sending in self._unsent.values():
            sending.cancel()


def _connection_of(ctx: Context) -> Connection:
    """Return the connection of a request. The SDK has no public name for it; every request has a session of its own."""
    return ctx.session._connection
