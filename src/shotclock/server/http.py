"""HTTP: the operators' page and, where there is an App, the SDK's own transport for MCP (one POST per call, and
sessions for older clients), on a socket of ours, behind one door."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn
from mcp.server import _streamable_http_modern as modern_transport
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..inbox.inbox import Inbox
from ..store.store import Store
from .addresses import url_of
from .connections import Connection, Connections
from .web.allowed_origins import Site
from .web.auth import MCP_PATH, AuthMiddleware
from .web.routes import Operators
from .web.sessions import Link, Sessions

# Once we are told to stop and everything is answered, how long connections may take to go. Nobody works any more.
FAREWELL_S = 1
# The SDK pings every response that is still open, by itself each 15 s: ten thousand callers who wait for a person would
# be hundreds of pings a second, in bursts that hold up everybody else. Proxies drop what is silent for a minute.
PING_S = 45.0
# Sessions of older clients cost some 40 kB each. Of one principal the one that was idle longest makes room for the
# next; its client is told that there is no such session, and begins another.
MOST_SESSIONS = 2_000
MOST_SESSIONS_EACH = 500
# Who may ask is looked at once, at the door.
_SECURITY = TransportSecuritySettings(enable_dns_rebinding_protection=False)


def mcp_url(sock: socket.socket) -> str:
    """Where clients find the tools."""
    host, port = sock.getsockname()[:2]
    return url_of((host, port), MCP_PATH)


class HttpServer(uvicorn.Server):
    """Serves until it is told to leave. Signals are ours. `say` is told the link for the operator, where there is one.

    Without an MCP server it is the page alone.
    """

    def __init__(
        self,
        mcp: Server[Any] | None,
        sock: socket.socket,
        health: Callable[[], Mapping[str, object]],
        *,
        store: Callable[[], Store],
        inbox: Callable[[], Inbox],
        require_token: bool,
        most_connections: int,
        say: Callable[[str], None],
    ) -> None:
        self._operators = Operators("" if mcp is None else mcp.name, inbox)
        address: tuple[str, int] = sock.getsockname()[:2]
        site = Site.at(address, os.environ, require_token=require_token)

        def say_link(key: str) -> None:
            say(f"operators decide at {url_of(address, f'/?key={key}' if key else '/')}")

        link = None if site.wants_token else Link(say_link)
        routes = [Route("/health", _health_endpoint(health), methods=["GET"]), *self._operators.routes()]
        app = Starlette(routes=routes) if mcp is None else _with_mcp(mcp, routes)
        auth_middleware = AuthMiddleware(
            app, site, store, Sessions(lambda: store().home), link, max(1, most_connections * 3 // 4)
        )
        self._operators.auth_middleware = auth_middleware
        say_link("" if link is None else link.key)
        self._connections = Connections(most_connections, say)
        super().__init__(
            uvicorn.Config(
                auth_middleware,
                http="h11",
                log_config=None,
                log_level="error",  # what clients do wrong is said to them
                access_log=False,
                ws="none",
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=FAREWELL_S,
            )
        )
        self._sock = sock

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_left(self) -> None:
        await self.serve(sockets=[self._sock])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._connections.listen(self._sock, self._connection)

    def _connection(self) -> Connection:
        return Connection(
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.stop_listening(self._sock)
        await super().shutdown(sockets)

    def leave(self) -> None:
        self._operators.end_waits()
        self.should_exit = True


def _with_mcp(server: Server[Any], routes: list[Route]) -> Starlette:
    modern_transport._SSE_PING_INTERVAL = PING_S  # a constant of its module; there is no option
    sessions = McpSessions(server, security_settings=_SECURITY, max_sessions=MOST_SESSIONS)
    return Starlette(
        routes=[Route(MCP_PATH, StreamableHTTPASGIApp(sessions)), *routes], lifespan=lambda app: sessions.run()
    )


class McpSessions(StreamableHTTPSessionManager):
    """The SDK's sessions, so many for each principal; the anonymous are one."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        own = [
            (math.inf if transport.idle_scope is None else transport.idle_scope.deadline, id)
            for id, transport in self._server_instances.items()
            if self._session_owners.get(id) == requestor
        ]
        if len(own) >= MOST_SESSIONS_EACH:
            idle_until, id = min(own)
            scope = self._server_instances[id].idle_scope
            if scope is None or idle_until == math.inf:  # each of them has a request under way
                return None
            self._server_instances.pop(id)
            self._session_owners.pop(id, None)
            scope.cancel()
        return super()._admit_session(requestor)


def _health_endpoint(health: Callable[[], Mapping[str, object]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse({"ok": True, **health()})

    return endpoint
