"""The HTTP server: the operators' page and, with an App, the SDK's transport for MCP.

Open connections are bounded in number, and in the time that each may keep the server waiting:

    headers   from the connection, or its last answer   HEADERS_WITHIN_S
    body      from then on                              BODY_WITHIN_S
    answer    the work has clocks of its own            –
              not read by the client                    TAKEN_WITHIN_S, and MOST_UNSENT bytes of all together

When all are in use, the oldest one without a whole request is dropped, so that half a request keeps no client out. All
of this comes before authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import anyio
import h11
import uvicorn
from mcp.server import _streamable_http_modern as modern_transport
from mcp.server import streamable_http as sessions_transport
from mcp.server.auth.middleware.bearer_auth import AuthorizationContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...core.value_types import JsonObject
from ...people.addresses import Site, url_of
from ...people.auth import MCP_PATH, AuthMiddleware, Link
from ...store.store import Store
from ...supervise.clock import monotonic_ns
from ..web.routes import Operators

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from ...people.issuer import Issuer

HEADERS_WITHIN_S = 10.0
BODY_WITHIN_S = 30.0  # 4 MiB, over a line of a megabit a second
TAKEN_WITHIN_S = 60.0
# Of answers that their clients have not read, together. The connection that holds one for longest is dropped.
MOST_UNSENT = 64 * 1024 * 1024
CLOSED_WITHIN_S = 2.0  # for the last bytes of a closed connection to be read by its client
# In one turn of the loop. The descriptor of a dropped connection is closed a turn later, so this many are kept spare.
ACCEPTED_AT_ONCE = 16
# When there are no descriptors although some were kept: other parts of the process may close theirs by then.
ACCEPT_AGAIN_S = 0.2
COMPLAIN_EVERY_NS = 60 * 10**9

_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"


class Connections:
    """At most `most` connections. Dropped ones are reported to `say` now and then."""

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self._most = most
        self._say = say
        self._warned_at_ns: int | None = None
        self._dropped = 0
        self._open: set[Connection] = set()
        self._incomplete: dict[Connection, None] = {}  # without a whole request, oldest first
        self._unread: dict[Connection, None] = {}  # with an answer that the client does not read, oldest first
        self._connecting: set[asyncio.Task[Any]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._make: Callable[[], Connection]

    def listen(self, sock: socket.socket, make: Callable[[], Connection]) -> None:
        sock.setblocking(False)
        self._make = make
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def stop_listening(self, sock: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(sock)
        if self._again is not None:
            self._again.cancel()

    def _accept(self, sock: socket.socket) -> None:
        """Accept some: asyncio's server accepts its whole backlog, and logs a traceback for each missing descriptor."""
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._complain(f"cannot accept connections: {error.strerror or error}")
                if not self._drop_incomplete():
                    loop.remove_reader(sock)
                    self._again = loop.call_later(ACCEPT_AGAIN_S, loop.add_reader, sock, self._accept, sock)
                return
            accepted.setblocking(False)
            if len(self._open) >= self._most and not self._drop_incomplete():
                self._complain(f"all {self._most} connections are in use: more are refused")
                with accepted, contextlib.suppress(OSError):
                    accepted.send(_FULL)
                continue
            connection = self._make()
            self._open.add(connection)
            connecting = loop.create_task(self._connect(connection, accepted))
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # the client has left already
            self.forget(connection)
        except asyncio.CancelledError:
            self.forget(connection)
            raise

    def _drop_incomplete(self) -> bool:
        """Make room for one connection. Returns False if all of them wait for an answer."""
        oldest = next(iter(self._incomplete), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.transport.abort()
        self._dropped += 1
        self._complain(f"{self._dropped} connections were dropped before their request was complete")
        return True

    def _complain(self, what: str, why: str = "") -> None:
        now_ns = monotonic_ns()
        if self._warned_at_ns is None or now_ns - self._warned_at_ns > COMPLAIN_EVERY_NS:
            self._warned_at_ns = now_ns
            self._say(f"{what}; {why or f'at most {self._most} are kept open, which follows from `ulimit -n`'}")

    def wait_for_request(self, connection: Connection) -> None:
        if connection in self._open:
            self._incomplete.setdefault(connection)

    def take_request(self, connection: Connection) -> None:
        self._incomplete.pop(connection, None)

    def note_unread(self, connection: Connection) -> None:
        """Count what a connection holds for its client; drop the oldest ones if all of them hold too much."""
        self._unread.setdefault(connection)
        while sum(each.transport.get_write_buffer_size() for each in self._unread) > MOST_UNSENT:
            oldest = next(iter(self._unread))
            self.note_read(oldest)
            oldest.transport.abort()
            limit = f"{MOST_UNSENT // 1024 // 1024} MiB are the most for all clients"
            self._complain("the connection of a client that did not read its answer was dropped", limit)

    def note_read(self, connection: Connection) -> None:
        self._unread.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        self.note_read(connection)
        self._open.discard(connection)
        self._incomplete.pop(connection, None)


class Connection(H11Protocol):
    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._phase = ""
        self._timer: asyncio.TimerHandle | None = None
        self._taken_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Corked(transport))  # type: ignore[arg-type]
        self._set_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        self._expire_after(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.note_unread(self)
        if self._taken_timer is None:
            self._taken_timer = self.loop.call_later(TAKEN_WITHIN_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.note_read(self)
        if self._taken_timer is not None:
            self._taken_timer.cancel()
            self._taken_timer = None

    def _set_phase(self) -> None:
        if self.transport.is_closing():
            phase, within_s = "close", CLOSED_WITHIN_S
        elif self.conn.their_state is h11.IDLE:
            phase, within_s = "headers", HEADERS_WITHIN_S
        elif self.conn.their_state is h11.SEND_BODY:
            phase, within_s = "body", BODY_WITHIN_S
        else:
            phase, within_s = "answer", None
        if phase == self._phase:
            return
        self._phase = phase
        self._expire_after(within_s)
        if within_s is None:
            self._connections.take_request(self)
        else:
            self._connections.wait_for_request(self)

    def _expire_after(self, within_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if within_s is None else self.loop.call_later(within_s, self._expire)

    def _expire(self) -> None:
        is_answered = self._phase == "body" and self.cycle.response_started
        if self._phase == "close" or is_answered:
            self.transport.abort()
            return
        if self._phase == "body" or self.conn.trailing_data[0]:
            self.transport.write(_TIMED_OUT)
        self.transport.close()
        self._set_phase()


class _Corked:
    """A transport that sends all writes of one turn together: head and body would wake the client twice."""

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


FAREWELL_S = 1  # for connections to close once the server stops and everything is answered
# The SDK pings every open response each 15 s: hundreds a second, in bursts, with ten thousand waiting callers. Proxies
# drop a connection that is silent for a minute.
PING_S = 45.0
HEAD_WITHIN_S = 0.05  # a client of a session gets the head of its answer by then, even if the answer takes longer
# An answer, not a request or a notification, which may be the only message when a session ends.
_ANSWER = re.compile(r'\{"jsonrpc":"2\.0","id":[^,]+,"(?:result|error)":')
# Sessions of older clients take some 40 kB each. The longest idle one of a principal makes room for the next.
MOST_SESSIONS = 2_000
MOST_SESSIONS_EACH = 500
# AuthMiddleware checks `Host` and `Origin`.
_SECURITY = TransportSecuritySettings(enable_dns_rebinding_protection=False)


class HttpServer(uvicorn.Server):
    """A server that runs until `leave`; without an MCP server, the page alone. `say` prints the operator's link."""

    def __init__(
        self,
        mcp: Server[Any] | None,
        sock: socket.socket,
        health: Callable[[], Mapping[str, object]],
        *,
        operators: Operators,
        store: Callable[[], Store],
        require_token: bool,
        issuer: Issuer | None = None,
        most_connections: int,
        say: Callable[[str], None],
    ) -> None:
        self._operators = operators
        address: tuple[str, int] = sock.getsockname()[:2]
        self._issuer = issuer
        public_name = None if issuer is None else issuer.wanted.host
        site = Site.at(address, os.environ, require_token=require_token, public_name=public_name)

        def say_link(key: str) -> None:
            say(f"operators decide at {url_of(address, f'/?key={key}' if key else '/')}")

        async def show_health(request: Request) -> Response:
            return JSONResponse({"ok": True, **health()})

        link = None if site.wants_token else Link(say_link)
        routes = [Route("/health", show_health, methods=["GET"]), *self._operators.routes()]
        routes += [] if issuer is None else issuer.routes()
        app = Starlette(routes=routes) if mcp is None else _with_mcp(mcp, routes)
        auth_middleware = AuthMiddleware(app, site, store, link, max(1, most_connections * 3 // 4), issuer)
        self._operators.auth = auth_middleware
        say_link("" if link is None else link.key)
        self._connections = Connections(most_connections, say)
        super().__init__(
            uvicorn.Config(
                auth_middleware,
                http="h11",
                log_config=None,
                log_level="error",  # mistakes of clients are reported to them
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
        if self._issuer is not None:
            self._issuer.begin_fetch()  # so that a wrong issuer is reported now
        self._connections.listen(self._sock, self._connection)

    def _connection(self) -> Connection:
        return Connection(
            self._connections, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.stop_listening(self._sock)
        await super().shutdown(sockets)

    def leave(self) -> None:
        self._operators.end_waits()
        self.should_exit = True


def _with_mcp(server: Server[Any], routes: list[BaseRoute]) -> Starlette:
    modern_transport._SSE_PING_INTERVAL = PING_S  # a constant of its module; there is no option
    sessions_transport.EventSourceResponse = EventStream  # type: ignore[attr-defined]
    sessions = McpSessions(server, security_settings=_SECURITY, max_sessions=MOST_SESSIONS)
    return Starlette(
        routes=[Route(MCP_PATH, StreamableHTTPASGIApp(sessions)), *routes], lifespan=lambda app: sessions.run()
    )


class EventStream(EventSourceResponse):
    """The answer to one POST of an older client. One that is ready soon, without notifications, is sent as JSON.

    Events cost the SDK five tasks, and the client wakes for the head, the answer and the end.
    """

    data_sender_callable: Callable[[], Coroutine[None, None, None]] | None
    body_iterator: AsyncIterable[JsonObject]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, self.data_sender_callable = self.data_sender_callable, None
        events = cast("MemoryObjectReceiveStream[dict[str, Any]]", self.body_iterator)
        ready: list[JsonObject] = []
        has_ended = False
        async with anyio.create_task_group() as tasks:
            if work is not None:
                tasks.start_soon(work)
            if scope["method"] == "POST":
                with anyio.move_on_after(HEAD_WITHIN_S):
                    async for event in events:
                        ready.append(event)
                        if not _ANSWER.match(event["data"]):
                            break
                    else:
                        has_ended = True
            if has_ended and len(ready) == 1:
                await self._send_json(ready[0]["data"].encode(), send)
            else:
                self.body_iterator = _rejoin(ready, events)
                await super().__call__(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _send_json(self, body: bytes, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-type"]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _rejoin(ready: list[JsonObject], rest: AsyncIterable[JsonObject]) -> AsyncIterator[JsonObject]:
    for event in ready:
        yield event
    async for event in rest:
        yield event


class McpSessions(StreamableHTTPSessionManager):
    """The SDK's sessions, bounded for each principal. All anonymous clients are one."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        own = [
            (math.inf if transport.idle_scope is None else transport.idle_scope.deadline, id)
            for id, transport in self._server_instances.items()
            if self._session_owners.get(id) == requestor
        ]
        if len(own) >= MOST_SESSIONS_EACH:
            idle_until, id = min(own)
            scope = self._server_instances[id].idle_scope
            if scope is None or idle_until == math.inf:  # each has a running request
                return None
            self._server_instances.pop(id)
            self._session_owners.pop(id, None)
            scope.cancel()
        return super()._admit_session(requestor)
