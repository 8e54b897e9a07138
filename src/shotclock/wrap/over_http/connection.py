"""A connection of an HTTP client: admission, bodies and answers, each with its limits.

headers   from the connection, or its last answer   HEADERS_WITHIN_MS
body      from then on                              BODY_WITHIN_MS
answer    the call has limits of its own            –
          not read by the client                    TAKEN_WITHIN_S
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import IO, Any, cast

from ...core.clocks import NS_PER_MS
from ...core.value_types import record
from ...process.addresses import Site
from ...process.clock import monotonic_ns
from ..mcp_headers import EVENT_TYPE, JSON_TYPE
from .outbox import Parcel, error_parcel
from .request_check import HttpRefusal
from .sessions import HttpSessions

MCP_PATH = "/mcp"
HEADERS_WITHIN_MS = 30_000
LONGEST_HEADERS = 64 * 1024
BODY_WITHIN_MS = 60_000
# A body is parsed as a whole, so that both its length and the number of large ones are bounded. The SDK of TypeScript
# has the same limit.
LONGEST_BODY = 4 * 1024 * 1024
LARGE_BODY = 64 * 1024
MOST_LARGE_BODIES = 2
ROOM_FOR_BODY_S = 20.0  # less than the time for headers, so that the refusal is sent
TAKEN_WITHIN_S = 60.0
LINGER_MS = 2_000  # for a refused client to read our answer
PIECE = 64 * 1024

TOKEN_INVALID = -32001

HeaderLines = Iterable[tuple[str, str]]
Authenticate = Callable[[str], str | None]
"""Returns the owner of a token; None for a wrong one. Raises HttpRefusal."""


class OpenConnections:
    """All open connections, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[HttpConnection, None] = {}

    def add(self, connection: HttpConnection) -> None:
        with self._lock:
            self._all[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        with self._lock:
            self._all.pop(connection, None)

    @property
    def count(self) -> int:
        return len(self._all)

    def list(self) -> tuple[HttpConnection, ...]:
        with self._lock:
            return tuple(self._all)

    def drop_oldest(self) -> bool:
        """Make room for a connection. Return False if all of them have a whole request."""
        incomplete = next((each for each in self.list() if not each.is_answering), None)
        if incomplete is None:
            return False
        incomplete.drop()
        self.remove(incomplete)
        return True

    def drop_late(self) -> None:
        now_ns = monotonic_ns()
        for connection in self.list():
            if connection.due_ns is not None and now_ns >= connection.due_ns:
                connection.drop()


@record
class FrontParts:
    """The parts of the front that all connections use."""

    site: Site
    sessions: HttpSessions
    authenticate: Authenticate
    connections: OpenConnections
    large_bodies: threading.BoundedSemaphore


class HttpConnection(BaseHTTPRequestHandler):
    """A connection and its requests, one after the other, on a thread of its own."""

    protocol_version = "HTTP/1.1"
    wbufsize = 8 * 1024
    rfile: BufferedIOBase
    close_connection: bool

    def __init__(self, request: socket.socket, address: Any, parts: FrontParts) -> None:
        self.parts = parts
        self.due_ns: int | None = None
        self.is_answering: bool = False
        self._unread = 0  # of the body
        self._lingers = False
        super().__init__(request, address, cast("Any", None))

    # --- the connection --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self._stream = self.rfile
        self.parts.connections.add(self)

    def finish(self) -> None:
        self.rfile = self._stream
        try:
            if self._lingers:
                self._linger()
            super().finish()
        finally:
            self.parts.connections.remove(self)
            self._stream.close()

    def _linger(self) -> None:
        """Read on for a moment: a client that is still sending would otherwise lose our answer."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self._expect(LINGER_MS)
        while self.connection.recv(PIECE):
            pass

    def drop(self) -> None:
        """Break the connection. Its thread then ends."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def handle_one_request(self) -> None:
        self.is_answering = False
        self._unread = 0
        self._expect(HEADERS_WITHIN_MS)
        self.rfile = cast("Any", _HeaderReader(cast("IO[bytes]", self._stream)))
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_parsed = super().parse_request()
        self.rfile = self._stream
        return is_parsed

    def handle_expect_100(self) -> bool:
        is_expected = super().handle_expect_100()
        self.wfile.flush()
        return is_expected

    def _expect(self, within_ms: int | None) -> None:
        self.due_ns = None if within_ms is None else monotonic_ns() + within_ms * NS_PER_MS

    def version_string(self) -> str:
        return "shotclock"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: mistakes of clients are reported to them."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection = True
        if code == 501:  # the method
            self._answer_error(HttpRefusal(405, "Method Not Allowed", headers=[("Allow", "GET, POST, DELETE")]))
        else:
            self._answer_error(HttpRefusal(code, message or http.client.responses.get(code, "")))

    @property
    def is_client_gone(self) -> bool:
        try:
            poller = select.poll()
            poller.register(self.connection, select.POLLIN)
            if not poller.poll(0):
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    # --- admission -------------------------------------------------------------------------------------------------

    def handle_admitted(self, handle: Callable[[str], None]) -> None:
        """Call a handler with the owner of the request, or answer its refusal."""
        try:
            self._read_length()  # first: the body of a refused request must not be read as the next request
            self._check_names()
            if self.path.partition("?")[0].rstrip("/") != MCP_PATH:
                raise HttpRefusal(404, f"there is only {MCP_PATH} here")
            handle(self._admit())
        except HttpRefusal as refusal:
            if not self._lingers:
                self.discard_body()
            self._answer_error(refusal)

    def _check_names(self) -> None:
        hosts = self.headers.get_all("host", [])
        if len(hosts) != 1 or not self.parts.site.answers_to(hosts[0]):
            raise HttpRefusal(421, f"this server is not {''.join(hosts)[:100]!r}")
        for origin in self.headers.get_all("origin", []):
            if not self.parts.site.knows_page(origin, hosts[0], from_here=True):
                raise HttpRefusal(403, f"pages from {origin[:100]!r} may not ask this server")

    def _admit(self) -> str:
        """Return the owner of the request: the name of its token, or nothing from this machine. Raises HttpRefusal."""
        bearer = [("WWW-Authenticate", 'Bearer realm="shotclock"')]
        credentials = self.headers.get_all("authorization", [])
        if credentials:
            kind, _, token = credentials[0].partition(" ")
            is_bearer = len(credentials) == 1 and kind.lower() == "bearer"
            owner = self.parts.authenticate(token.strip()) if is_bearer else None
            if owner is None:
                message = "this token is not known, or was revoked, or has expired"
                if not is_bearer:
                    message = "send one header: Authorization: Bearer TOKEN"
                raise HttpRefusal(401, message, code=TOKEN_INVALID, headers=bearer)
            return owner
        if not self.parts.site.is_direct(name.lower() for name in self.headers):
            raise HttpRefusal(401, "this server requires a token with this request", code=TOKEN_INVALID, headers=bearer)
        return ""

    def _read_length(self) -> None:
        lengths = self.headers.get_all("content-length", [])
        length = lengths[0].strip() if lengths else "0"
        self._lingers = True
        if "transfer-encoding" in self.headers or len(lengths) > 1 or (self.command == "POST" and not lengths):
            raise HttpRefusal(411, "send the body with one Content-Length")
        is_number = length.isascii() and length.isdecimal() and len(length) <= 20
        if not is_number or int(length) > LONGEST_BODY:
            raise HttpRefusal(413, f"a body may have {LONGEST_BODY} bytes here")
        self._lingers = False
        self._unread = int(length)

    def discard_body(self) -> None:
        """Read the rest of a body, so that the connection can be used again."""
        self._expect(BODY_WITHIN_MS)
        while self._unread and (piece := self._stream.read(min(PIECE, self._unread))):
            self._unread -= len(piece)

    @contextlib.contextmanager
    def body(self) -> Iterator[bytes]:
        """Read the body. Raises HttpRefusal."""
        is_large = self._unread > LARGE_BODY
        if is_large and not self.parts.large_bodies.acquire(timeout=ROOM_FOR_BODY_S):
            raise HttpRefusal(503, "too many large requests at once", headers=[("Retry-After", "5")])
        try:
            self._expect(BODY_WITHIN_MS)
            body = self._stream.read(self._unread)
            if len(body) < self._unread:
                raise ConnectionError("the client has left before it had sent the whole request")
            self._unread = 0
            self.note_whole_request()
            yield body
        finally:
            if is_large:
                self.parts.large_bodies.release()

    def note_whole_request(self) -> None:
        """End the limits of the client's part."""
        self._expect(None)
        self.is_answering = True

    # --- answers ---------------------------------------------------------------------------------------------------

    def answer_empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self._end_head()
        self.wfile.flush()

    def _answer_error(self, refusal: HttpRefusal) -> None:
        self.close_connection = self.close_connection or self._lingers
        self.answer_json(
            error_parcel(refusal.id, refusal.code, refusal.message, refusal.data), refusal.status, refusal.headers
        )

    def answer_json(self, parcel: Parcel, status: int, headers: HeaderLines = ()) -> None:
        self.send_response(status)
        self.send_header("Content-Type", JSON_TYPE)
        self.send_header("Content-Length", str(parcel.size))
        self._end_head(headers)
        for piece in parcel.pieces():
            self.wfile.write(piece)
        self.wfile.flush()

    def begin_events(self, headers: HeaderLines = ()) -> None:
        self.send_response(200)
        self.send_header("Content-Type", EVENT_TYPE)
        self.send_header("Cache-Control", "no-cache, no-transform")
        self.send_header("X-Accel-Buffering", "no")
        if self._is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self._end_head(headers)

    def write_event(self, parcel: Parcel, id_line: str) -> None:
        self.write_events(f"event: message\r\n{id_line}data: ".encode())
        for piece in parcel.pieces():
            self.write_events(piece)
        self.write_events(b"\r\n\r\n")

    def write_events(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text) if self._is_chunked else text)

    def end_events(self) -> None:
        if self._is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    @property
    def _is_chunked(self) -> bool:
        return self.request_version >= "HTTP/1.1"

    def _end_head(self, headers: HeaderLines = ()) -> None:
        for name, value in headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


class _HeaderReader:
    """The part of a connection with the request line and headers, of bounded length."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._left = LONGEST_HEADERS

    def readline(self, size: int = -1) -> bytes:
        line = self._stream.readline(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("headers")
        return line
