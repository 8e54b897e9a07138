"""HTTP: the SDK's own transport for MCP (one POST per call, and sessions for older clients) and the operators' page, on
a socket of ours, behind one door."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
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

from ..core.errors import Failure
from ..inbox import Inbox
from ..store import Store
from .operators.access import MCP_PATH, Door
from .operators.routes import Operators
from .operators.sessions import Link, Sessions
from .operators.sites import Site, is_loopback

BACKLOG = 1024
# Once we are told to stop and everything is answered, how long connections may take to go. Nobody works any more.
FAREWELL_S = 1
# The SDK pings every response that is still open, by itself each 15 s: ten thousand callers who wait for a person would
# be hundreds of pings a second, in bursts that hold up everybody else. Proxies drop what is silent for a minute.
PING_S = 45.0
# Who may ask is looked at once, at the door.
_SECURITY = TransportSecuritySettings(enable_dns_rebinding_protection=False)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises ValueError that says what is wrong with it."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"{text!r} should be HOST:PORT, as in 127.0.0.1:8000")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if host == "localhost":
        return "127.0.0.1", int(port)
    try:
        return str(ipaddress.ip_address(host)), int(port)
    except ValueError:  # who knows where it leads, or how long it takes to find out
        raise ValueError(f"{host!r} is a name: say the address to listen on, as in 127.0.0.1 or 0.0.0.0") from None


def check_reach(address: tuple[str, int], has_tokens: Callable[[], bool]) -> None:
    """Other machines are served only where they can be told apart. Raises ValueError."""
    if not is_loopback(address[0]) and not has_tokens():
        raise ValueError(
            f"{address[0]} can be reached from other machines, and there are no access tokens yet: "
            "make one with `shotclock token create`, or serve on 127.0.0.1"
        )


def bound_socket(address: tuple[str, int]) -> socket.socket:
    """Raises Failure where the address cannot be had."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    # With the protocol named, asyncio turns off Nagle's algorithm on what is accepted; without, an answer takes 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        where = url_of(address)
        raise Failure("ADDRESS_UNAVAILABLE", f"cannot listen on {where}: {error.strerror or error}") from None
    return sock


def url_of(address: tuple[str, int], path: str = "") -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{host}:{address[1]}{path}"


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
