"""HTTP: the SDK's own transport for MCP (one POST per call, and sessions for older clients) and the operators' page, on
a socket of ours, behind one door."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn
from mcp.server import _streamable_http_modern as modern_transport
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..inbox import Inbox
from ..store import Store
from .addresses import BACKLOG, url_of
from .operators.access import MCP_PATH, Door
from .operators.routes import Operators
from .operators.sessions import Link, Sessions
from .operators.sites import Site

# Once we are told to stop and everything is answered, how long connections may take to go. Nobody works any more.
FAREWELL_S = 1
# The SDK pings every response that is still open, by itself each 15 s: ten thousand callers who wait for a person would
# be hundreds of pings a second, in bursts that hold up everybody else. Proxies drop what is silent for a minute.
PING_S = 45.0
# Who may ask is looked at once, at the door.
_SECURITY = TransportSecuritySettings(enable_dns_rebinding_protection=False)


def mcp_url(sock: socket.socket) -> str:
    """Where clients find the tools."""
    host, port = sock.getsockname()[:2]
    return url_of((host, port), MCP_PATH)


class HttpServer(uvicorn.Server):
    """Serves until it is told to leave. Signals are ours. On this machine, `say` is told the link for the operator."""

    def __init__(
        self,
        server: Server[Any],
        sock: socket.socket,
        health: Callable[[], Mapping[str, object]],
        *,
        store: Callable[[], Store],
        inbox: Callable[[], Inbox],
        say: Callable[[str], None],
    ) -> None:
        modern_transport._SSE_PING_INTERVAL = PING_S  # a constant of its module; there is no option
        self._operators = Operators(server.name, inbox)
        address: tuple[str, int] = sock.getsockname()[:2]
        site = Site.at(address, os.environ)
        link = Link(lambda key: say(url_of(address, f"/?key={key}"))) if site.is_local else None
        app = server.streamable_http_app(
            streamable_http_path=MCP_PATH,
            transport_security=_SECURITY,
            custom_starlette_routes=[
                Route("/health", _health_endpoint(health), methods=["GET"]),
                *self._operators.routes(),
            ],
        )
        door = Door(app, site, store, Sessions(lambda: store().home), link)
        self._operators.door = door
        say(url_of(address, f"/?key={link.key}" if link is not None else "/"))
        super().__init__(
            uvicorn.Config(
                door,
                http=_Protocol,
                log_config=None,
                access_log=False,
                ws="none",
                lifespan="on",
                backlog=BACKLOG,
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

    def leave(self) -> None:
        self._operators.end_streams()
        self.should_exit = True


class _Corked:
    """A transport that sends what is written in one turn of the loop in one piece: the head and the body of an answer
    would otherwise wake the client twice."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)

    def _send(self) -> None:
        held, self._held = self._held, []
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Corked(transport))  # type: ignore[arg-type]


def _health_endpoint(health: Callable[[], Mapping[str, object]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return JSONResponse({"ok": True, **health()})

    return endpoint
