"""A stdio server offered over streamable HTTP: a thread for each connection, a child for each session.

Open connections are bounded in number, and in the time that each may keep the front waiting:

    headers   from the connection, or its last answer   HEADERS_WITHIN_MS
    body      from then on                              BODY_WITHIN_MS, and more for a long one
    answer    the call has limits of its own            –
              not read by the client                    TAKEN_WITHIN_S

When all are in use, the oldest one without a whole request is dropped. All of this comes before authentication.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import signal
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import IO, Any, cast

from ..core.clocks import NS_PER_MS
from ..process.addresses import Site, url_of
from ..process.clock import monotonic_ns, pause
from ..process.command_task import Order
from ..process.foreground import TerminalSignals
from .http_children import Notes
from .http_headers import (
    EVENT_TYPE,
    FIRST_RESUMABLE,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    JSON_TYPE,
    LAST_EVENT_ID,
    REVISION,
    REVISIONS_WITH_SESSIONS,
    SESSION_ID,
    STATUS_OF_ERROR,
    accepted_types,
    header,
    is_json,
    problem_with_headers,
    problem_with_revision,
)
from .http_sessions import METHOD_NOT_FOUND, FrontSettings, Refusal, Session, Sessions, SharedSession, error_payload
from .http_streams import Event, StreamReader
from .members import Members
from .messages import LISTEN, REVISION_KEY
from .payloads import PIECE, Payload

MCP_PATH = "/mcp"
MOST_CONNECTIONS = 512
HEADERS_WITHIN_MS = 30_000
LONGEST_HEADERS = 64 * 1024
BODY_WITHIN_MS = 30_000
SLOWEST_BODY = 128 * 1024  # bytes in a second
LONGEST_BODY = 64 * 1024 * 1024
LONGEST_DISCARDED = 256 * 1024  # of a body that is refused; the connection can be used again then
TAKEN_WITHIN_S = 60.0
LINGER_MS = 2_000  # for a refused client to read our answer
PING_MS = 15_000
# An answer that comes first, and this soon, is sent as JSON: it has a status, and clients limit the size of events.
ANSWER_WITHIN_MS = 15_000
LOOK_S = 1.0
LOOK_MS = 1_000
ACCEPT_AGAIN_S = 0.1
SHORT_LOOK_MS = 20
FAREWELL_MS = 1_000  # for connections to send their last answers
GIVE_UP_MS = 15_000
RETRY_MS = 1_000

PARSE_ERROR = -32700
TOKEN_INVALID = -32001

Authenticate = Callable[[str], str | None]
"""Returns the name of the owner of a token; None for a wrong one."""


class HttpFront:
    """The loop that accepts connections, ends idle sessions and obeys signals."""

    def __init__(
        self,
        sock: socket.socket,
        site: Site,
        settings: FrontSettings,
        authenticate: Authenticate,
        signals: TerminalSignals,
    ) -> None:
        self.site = site
        self.authenticate = authenticate
        self.notes = Notes()
        self.sessions = Sessions(settings, self.notes)
        self._settings = settings
        self._sock = sock
        self._signals = signals
        self._lock = threading.Lock()
        self._connections: dict[Connection, None] = {}  # the oldest first

    def run(self, name: str) -> None:
        """Serve until a signal arrives and all children have ended."""
        self.notes.say(f"serving {name} on {url_of(self._sock.getsockname()[:2], MCP_PATH)}")
        self._sock.setblocking(False)
        poller = select.poll()
        for fd in (self._sock.fileno(), self._signals.fd):
            poller.register(fd, select.POLLIN)
        while self._signals.stopped_by is None:
            for fd, _ in poller.poll(LOOK_MS):
                if fd == self._sock.fileno():
                    self._accept()
            self._obey_signals()
            self._drop_late()
            self.sessions.end_idle()
        self._sock.close()
        self._end_children()

    def _obey_signals(self) -> None:
        while (order := self._signals.next_order()) is not None:
            if order[0] == Order.SUSPEND:
                self._signals.suspend()
            elif order[0] == Order.KILL:
                self.sessions.kill()

    def _end_children(self) -> None:
        name = self._signals.stopped_by or "SIGTERM"
        self.sessions.stop(signal.Signals[name], f"this server was stopped by {name}")
        poller = select.poll()
        poller.register(self._signals.fd, select.POLLIN)
        # Each child is killed by its own thread at the end of its limits, so that this is never exhausted.
        give_up_ns = monotonic_ns() + (self._settings.end_within_ms + GIVE_UP_MS) * NS_PER_MS
        while self.sessions.has_children and monotonic_ns() < give_up_ns:
            poller.poll(SHORT_LOOK_MS)
            self._obey_signals()
        give_up_ns = monotonic_ns() + FAREWELL_MS * NS_PER_MS
        while any(each.is_answering for each in self._all()) and monotonic_ns() < give_up_ns:
            pause(SHORT_LOOK_MS / 1000)

    def _accept(self) -> None:
        try:
            accepted, address = self._sock.accept()
        except BlockingIOError:
            return
        except OSError:  # there are no descriptors, or the client has left already
            pause(ACCEPT_AGAIN_S)
            return
        accepted.settimeout(TAKEN_WITHIN_S)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._connections) >= MOST_CONNECTIONS and not self._drop_oldest():
            with accepted, contextlib.suppress(OSError):
                accepted.send(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return
        threading.Thread(target=self._serve, args=(accepted, address), daemon=True).start()

    def _serve(self, accepted: socket.socket, address: Any) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):  # the client has gone, or errs
            Connection(accepted, address, self)
        with contextlib.suppress(OSError):
            accepted.close()

    def add(self, connection: Connection) -> None:
        with self._lock:
            self._connections[connection] = None

    def remove(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def _all(self) -> list[Connection]:
        with self._lock:
            return list(self._connections)

    def _drop_oldest(self) -> bool:
        """Make room for a connection. Return False if all of them have a whole request."""
        incomplete = next((each for each in self._all() if not each.is_answering), None)
        if incomplete is None:
            return False
        incomplete.drop()
        self.remove(incomplete)
        return True

    def _drop_late(self) -> None:
        now_ns = monotonic_ns()
        for connection in self._all():
            if connection.due_ns is not None and now_ns >= connection.due_ns:
                connection.drop()


class Connection(BaseHTTPRequestHandler):
    """A connection and its requests, one after the other, on a thread of its own."""

    protocol_version = "HTTP/1.1"
    wbufsize = PIECE

    def __init__(self, request: socket.socket, address: Any, front: HttpFront) -> None:
        self.front = front
        self.due_ns: int | None = None
        self.is_answering = False
        self._unread = 0  # of the body
        self._lingers = False
        super().__init__(request, address, cast("Any", front))

    # --- the connection --------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self._stream = self.rfile
        self.front.add(self)

    def finish(self) -> None:
        self.rfile = self._stream
        try:
            if self._lingers:
                self._linger()
            super().finish()
        finally:
            self.front.remove(self)
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
        self._answer_error(Refusal(code, message or http.client.responses.get(code, "")))

    @property
    def _is_client_gone(self) -> bool:
        try:
            poller = select.poll()
            poller.register(self.connection, select.POLLIN)
            if not poller.poll(0):
                return False
            return not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    # --- admission -------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        self._handle(self._post)

    def do_GET(self) -> None:
        self._handle(self._get)

    def do_DELETE(self) -> None:
        self._handle(self._delete)

    def _handle(self, handle: Callable[[str], None]) -> None:
        try:
            self._read_length()  # first: the body of a refused request must not be read as the next request
            self._check_names()
            if self.path.partition("?")[0].rstrip("/") != MCP_PATH:
                raise Refusal(404, f"there is only {MCP_PATH} here")
            handle(self._admit())
        except Refusal as refusal:
            self._discard_body()
            self._answer_error(refusal)

    def _check_names(self) -> None:
        hosts = self.headers.get_all("host", [])
        if len(hosts) != 1 or not self.front.site.answers_to(hosts[0]):
            raise Refusal(421, f"this server is not {''.join(hosts)[:100]!r}")
        for origin in self.headers.get_all("origin", []):
            if not self.front.site.knows_page(origin, hosts[0], from_here=True):
                raise Refusal(403, f"pages from {origin[:100]!r} may not ask this server")

    def _admit(self) -> str:
        """Return the owner of the request: the name of its token, or nothing from this machine. Raises Refusal."""
        bearer = [("WWW-Authenticate", 'Bearer realm="shotclock"')]
        credentials = self.headers.get_all("authorization", [])
        if credentials:
            kind, _, token = credentials[0].partition(" ")
            if len(credentials) > 1 or kind.lower() != "bearer":
                raise Refusal(401, "send one header: Authorization: Bearer TOKEN", code=TOKEN_INVALID, headers=bearer)
            if (owner := self.front.authenticate(token.strip())) is None:
                message = "this token is not known, or was revoked, or has expired"
                raise Refusal(401, message, code=TOKEN_INVALID, headers=bearer)
            return owner
        if not self.front.site.is_direct(name.lower() for name in self.headers):
            raise Refusal(401, "this server requires a token with this request", code=TOKEN_INVALID, headers=bearer)
        return ""

    def _read_length(self) -> None:
        lengths = self.headers.get_all("content-length", [])
        if "transfer-encoding" in self.headers or len(lengths) > 1 or (self.command == "POST" and not lengths):
            self.close_connection = self._lingers = True
            raise Refusal(411, "send the body with one Content-Length")
        length = lengths[0].strip() if lengths else "0"
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > LONGEST_BODY:
            self.close_connection = self._lingers = True
            raise Refusal(413, f"a body may have {LONGEST_BODY} bytes here")
        self._unread = int(length)

    def _discard_body(self) -> None:
        """Read the rest of a short body, so that the connection can be used again."""
        if self._unread > LONGEST_DISCARDED:
            self.close_connection = self._lingers = True
        elif self._unread:
            self._stream.read(self._unread)
        self._unread = 0

    def _read_body(self) -> Payload:
        self._expect(BODY_WITHIN_MS + self._unread * 1000 // SLOWEST_BODY)
        payload = Payload()
        while self._unread:
            piece = self._stream.read(min(PIECE, self._unread))
            if not piece:
                payload.close()
                raise ConnectionError("the client has left before it had sent the whole request")
            self._unread -= len(piece)
            payload.add(piece)
        self._expect(None)
        self.is_answering = True
        return payload

    # --- requests --------------------------------------------------------------------------------------------------

    def _post(self, owner: str) -> None:
        takes_json, takes_events = accepted_types(self.headers)
        if not takes_json:
            raise Refusal(406, f"accept {JSON_TYPE} and {EVENT_TYPE}")
        if not is_json(self.headers):
            raise Refusal(415, f"send {JSON_TYPE}")
        payload = self._read_body()
        members = payload.scan()
        if members is None:
            is_batch = next(payload.pieces(), b"").lstrip()[:1] == b"["
            payload.close()
            if is_batch:
                raise Refusal(400, "batches of messages are not taken: send each message in a request of its own")
            raise Refusal(400, "Parse error", code=PARSE_ERROR)
        if not members.is_message or (("id",) in members and members.key is None and members.method is not None):
            payload.close()
            raise Refusal(400, "the body must be one JSON-RPC message")
        revision = header(self.headers, REVISION)
        has_envelope = ("params", "_meta", REVISION_KEY) in members and SESSION_ID not in self.headers
        if has_envelope or (revision is not None and revision not in REVISIONS_WITH_SESSIONS):
            self._post_without_session(payload, members, takes_events)
        else:
            self._post_to_session(payload, members, takes_events, owner)

    def _post_to_session(self, payload: Payload, members: Members, takes_events: bool, owner: str) -> None:
        is_greeting = members.method == "initialize" and SESSION_ID not in self.headers
        session = self.front.sessions.open(owner) if is_greeting else self._find_session(owner)
        if members.method is None or members.key is None:
            session.send(payload, members)
            self._answer(202)
            return
        reader = session.request(payload, members, only_answer=not takes_events)
        revision = members.read("params", "protocolVersion") if is_greeting else header(self.headers, REVISION)
        answer = _StreamAnswer(self, reader, session, is_resumable=revision == FIRST_RESUMABLE)
        try:
            first = answer.wait(takes_events=takes_events)
            if is_greeting and first is not None and first.error_code is not None:
                self._answer_json(first)
            else:
                answer.send(first)
                is_greeting = False
        finally:
            reader.leave()
            if is_greeting:
                session.end("its greeting has failed")

    def _find_session(self, owner: str) -> Session:
        id = header(self.headers, SESSION_ID)
        if id is None:
            raise Refusal(400, "Bad Request: Missing session ID")
        session = self.front.sessions.find(id, owner)
        if session is None:
            raise Refusal(404, "Session not found")
        return session

    def _post_without_session(self, payload: Payload, members: Members, takes_events: bool) -> None:
        if members.method is None:
            raise Refusal(400, "the body must be one request or notification")
        if ("id",) not in members:
            problem = problem_with_revision(header(self.headers, REVISION) or "")
        else:
            problem = problem_with_headers(self.headers, members)
        id_text = members.texts.get(("id",), b"null")
        if problem is not None:
            payload.close()
            code, message, data = problem
            self._answer_json_payload(error_payload(id_text, code, message, data), STATUS_OF_ERROR[code])
            return
        if ("id",) not in members:
            payload.close()
            self._answer(202)  # clients of this revision have none to send: closing the connection cancels
            return
        if members.method == "initialize":  # it would fix a server of both generations to the other one
            payload.close()
            self._answer_json_payload(error_payload(id_text, METHOD_NOT_FOUND, "Method not found"), 404)
            return
        if members.method == LISTEN and not takes_events:
            payload.close()
            raise Refusal(406, f"accept {EVENT_TYPE}")
        shared = self.front.sessions.shared()
        self._check_param_headers(shared, members)
        reader = shared.request(payload, members, only_answer=not takes_events)
        answer = _StreamAnswer(self, reader, None, is_resumable=False)
        try:
            answer.send(answer.wait(takes_events=takes_events))
        finally:
            self._leave_shared(shared, reader)

    def _check_param_headers(self, shared: SharedSession, members: Members) -> None:
        tool = members.read("params", "name")
        if members.method != "tools/call" or not shared.param_headers.declares(tool):
            return
        path = ("params", "arguments")
        if path in members and path not in members.texts:
            raise Refusal(400, "the arguments are too long to be compared with headers", code=HEADER_MISMATCH)
        problem = shared.param_headers.problem_with(tool, members.read(*path), self.headers)
        if problem is not None:
            raise Refusal(400, problem, code=HEADER_MISMATCH)

    @staticmethod
    def _leave_shared(shared: SharedSession, reader: StreamReader) -> None:
        if not reader.stream.is_ended:
            shared.cancel(reader.stream)
        shared.release(reader.stream)

    def _get(self, owner: str) -> None:
        self._discard_body()
        revision = header(self.headers, REVISION)
        if revision is not None and revision not in REVISIONS_WITH_SESSIONS:
            raise Refusal(405, "there are no sessions in this revision", headers=[("Allow", "POST")])
        if not accepted_types(self.headers)[1]:
            raise Refusal(406, f"accept {EVENT_TYPE}")
        session = self._find_session(owner)
        stream, after = session.other_messages, None
        if (last := header(self.headers, LAST_EVENT_ID)) is not None:
            number, _, event = last.partition("-")
            found = session.find_stream(int(number)) if number.isdecimal() and len(number) < 10 else None
            is_known = found is not None and event.isdecimal() and len(event) < 16 and found.can_resume(int(event))
            if found is None or not is_known:
                raise Refusal(400, "this event is not known any more", code=INVALID_PARAMS)
            stream, after = found, int(event)
        self._expect(None)
        self.is_answering = True
        reader = stream.attach(after)
        try:
            _StreamAnswer(self, reader, session, is_resumable=revision == FIRST_RESUMABLE).send(None)
        finally:
            reader.leave()

    def _delete(self, owner: str) -> None:
        self._discard_body()
        revision = header(self.headers, REVISION)
        if revision is not None and revision not in REVISIONS_WITH_SESSIONS:
            raise Refusal(405, "there are no sessions in this revision", headers=[("Allow", "POST")])
        self._find_session(owner).end("the client has ended the session")
        self._answer(200)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self._end_headers()
        self.wfile.flush()

    def _answer_error(self, refusal: Refusal) -> None:
        self._answer_json_payload(
            error_payload(b"null", refusal.code, refusal.message), refusal.status, refusal.headers
        )

    def _answer_json(self, event: Event, headers: tuple[tuple[str, str], ...] = (), status: int = 200) -> None:
        self._answer_json_payload(event.payload, status, headers)

    def _answer_json_payload(self, payload: Payload, status: int, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self.send_response(status)
        self.send_header("Content-Type", JSON_TYPE)
        self.send_header("Content-Length", str(payload.size))
        for name, value in headers:
            self.send_header(name, value)
        self._end_headers()
        for piece in payload.pieces():
            self.wfile.write(piece)
        self.wfile.flush()

    def _end_headers(self) -> None:
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


class _StreamAnswer:
    """The answer to one request from a stream: JSON if it comes first and soon, events otherwise."""

    def __init__(
        self, connection: Connection, reader: StreamReader, session: Session | None, *, is_resumable: bool
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._session = session
        self._is_resumable = is_resumable
        self._is_chunked = connection.request_version >= "HTTP/1.1"

    def wait(self, *, takes_events: bool) -> Event | None:
        """Return the answer if it comes first and in time. A client that takes no events waits for it."""
        give_up_ns = monotonic_ns() + ANSWER_WITHIN_MS * NS_PER_MS
        while True:
            left_s = (give_up_ns - monotonic_ns()) / 1e9
            events = self._reader.take(LOOK_S if not takes_events else max(0.0, min(LOOK_S, left_s)))
            if events:
                return events[0] if events[0].is_last else None
            if takes_events and monotonic_ns() >= give_up_ns:
                return None
            if self._reader.is_over or self._connection._is_client_gone:
                raise ConnectionError("the client has gone")

    def send(self, answer: Event | None) -> None:
        headers = () if self._session is None else (("Mcp-Session-Id", self._session.id),)
        if answer is not None:
            status = 200
            if self._session is None and answer.error_code is not None:
                status = STATUS_OF_ERROR.get(answer.error_code, 200)
            self._connection._answer_json(answer, headers, status)
            self._reader.note_sent(answer)
            return
        self._begin(headers)
        pinged_ns = monotonic_ns()
        while not self._reader.is_over:
            events = self._reader.take(LOOK_S)
            for event in events:
                self._send_event(event)
            if events:
                self._out.flush()
                self._reader.note_sent(events[-1])
            elif self._connection._is_client_gone:
                raise ConnectionError("the client has gone")
            elif monotonic_ns() - pinged_ns > PING_MS * NS_PER_MS:
                self._write(b": ping\r\n\r\n")
                self._out.flush()
            else:
                continue
            pinged_ns = monotonic_ns()
        if self._is_chunked:
            self._out.write(b"0\r\n\r\n")
        self._out.flush()

    @property
    def _out(self) -> IO[bytes]:
        return cast("IO[bytes]", self._connection.wfile)

    def _begin(self, headers: tuple[tuple[str, str], ...]) -> None:
        connection = self._connection
        connection.send_response(200)
        connection.send_header("Content-Type", EVENT_TYPE)
        connection.send_header("Cache-Control", "no-cache, no-transform")
        connection.send_header("X-Accel-Buffering", "no")
        for name, value in headers:
            connection.send_header(name, value)
        if self._is_chunked:
            connection.send_header("Transfer-Encoding", "chunked")
        else:
            connection.close_connection = True
        connection._end_headers()
        if self._is_resumable:
            id = f"{self._reader.stream.number}-{self._reader.at}"
            self._write(f"id: {id}\r\nretry: {RETRY_MS}\r\ndata:\r\n\r\n".encode())
        self._out.flush()

    def _send_event(self, event: Event) -> None:
        id = "" if self._session is None else f"id: {self._reader.stream.number}-{event.number}\r\n"
        self._write(f"event: message\r\n{id}data: ".encode())
        for piece in event.payload.pieces():
            self._write(piece)
        self._write(b"\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._is_chunked:
            self._out.write(b"%x\r\n" % len(data))
            self._out.write(data)
            self._out.write(b"\r\n")
        else:
            self._out.write(data)


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
