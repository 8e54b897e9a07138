"""A connection of an HTTP client: its admission, its requests, and the limits of both.

headers   from the connection, or its last answer   HEADERS_WITHIN_MS
body      from then on                              BODY_WITHIN_MS, and more for a long one
answer    the call has limits of its own            –
          not read by the client                    TAKEN_WITHIN_S
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import IO, Any, Protocol, cast

from ..core.clocks import NS_PER_MS
from ..process.addresses import Site
from ..process.clock import monotonic_ns
from .http_answers import HeaderLines, StreamAnswer
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
from .http_sessions import METHOD_NOT_FOUND, HttpRefusal, HttpSession, HttpSessions, SharedSession, error_payload
from .members import Members
from .messages import LISTEN, REVISION_KEY
from .payloads import PIECE, Payload

MCP_PATH = "/mcp"
HEADERS_WITHIN_MS = 30_000
LONGEST_HEADERS = 64 * 1024
BODY_WITHIN_MS = 30_000
SLOWEST_BODY = 128 * 1024  # bytes in a second
LONGEST_BODY = 64 * 1024 * 1024
LONGEST_DISCARDED = 256 * 1024  # of a body that is refused; the connection can be used again then
TAKEN_WITHIN_S = 60.0
LINGER_MS = 2_000  # for a refused client to read our answer

PARSE_ERROR = -32700
TOKEN_INVALID = -32001


class ConnectionFront(Protocol):
    """The process that a connection belongs to."""

    site: Site
    sessions: HttpSessions

    def authenticate(self, token: str) -> str | None:
        """Return the owner of a token; None for a wrong one. Raises HttpRefusal."""
        ...

    def add(self, connection: HttpConnection) -> None: ...

    def remove(self, connection: HttpConnection) -> None: ...


class HttpConnection(BaseHTTPRequestHandler):
    """A connection and its requests, one after the other, on a thread of its own."""

    protocol_version = "HTTP/1.1"
    wbufsize = PIECE

    def __init__(self, request: socket.socket, address: Any, front: ConnectionFront) -> None:
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
                raise HttpRefusal(404, f"there is only {MCP_PATH} here")
            handle(self._admit())
        except HttpRefusal as refusal:
            self._discard_body()
            self._answer_error(refusal)

    def _check_names(self) -> None:
        hosts = self.headers.get_all("host", [])
        if len(hosts) != 1 or not self.front.site.answers_to(hosts[0]):
            raise HttpRefusal(421, f"this server is not {''.join(hosts)[:100]!r}")
        for origin in self.headers.get_all("origin", []):
            if not self.front.site.knows_page(origin, hosts[0], from_here=True):
                raise HttpRefusal(403, f"pages from {origin[:100]!r} may not ask this server")

    def _admit(self) -> str:
        """Return the owner of the request: the name of its token, or nothing from this machine. Raises HttpRefusal."""
        bearer = [("WWW-Authenticate", 'Bearer realm="shotclock"')]
        credentials = self.headers.get_all("authorization", [])
        if credentials:
            kind, _, token = credentials[0].partition(" ")
            if len(credentials) > 1 or kind.lower() != "bearer":
                raise HttpRefusal(
                    401, "send one header: Authorization: Bearer TOKEN", code=TOKEN_INVALID, headers=bearer
                )
            if (owner := self.front.authenticate(token.strip())) is None:
                message = "this token is not known, or was revoked, or has expired"
                raise HttpRefusal(401, message, code=TOKEN_INVALID, headers=bearer)
            return owner
        if not self.front.site.is_direct(name.lower() for name in self.headers):
            raise HttpRefusal(401, "this server requires a token with this request", code=TOKEN_INVALID, headers=bearer)
        return ""

    def _read_length(self) -> None:
        lengths = self.headers.get_all("content-length", [])
        if "transfer-encoding" in self.headers or len(lengths) > 1 or (self.command == "POST" and not lengths):
            self.close_connection = self._lingers = True
            raise HttpRefusal(411, "send the body with one Content-Length")
        length = lengths[0].strip() if lengths else "0"
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > LONGEST_BODY:
            self.close_connection = self._lingers = True
            raise HttpRefusal(413, f"a body may have {LONGEST_BODY} bytes here")
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
            raise HttpRefusal(406, f"accept {JSON_TYPE} and {EVENT_TYPE}")
        if not is_json(self.headers):
            raise HttpRefusal(415, f"send {JSON_TYPE}")
        payload = self._read_body()
        try:
            self._take(payload, takes_events, owner)
        except HttpRefusal:
            payload.close()
            raise

    def _take(self, payload: Payload, takes_events: bool, owner: str) -> None:
        """Pass a message on and answer its request. Raises HttpRefusal."""
        members = payload.scan()
        if members is None:
            if next(payload.pieces(), b"").lstrip()[:1] == b"[":
                raise HttpRefusal(400, "batches of messages are not taken: send each message in a request of its own")
            raise HttpRefusal(400, "Parse error", code=PARSE_ERROR)
        if not members.is_message or (("id",) in members and members.key is None and members.method is not None):
            raise HttpRefusal(400, "the body must be one JSON-RPC message")
        revision = header(self.headers, REVISION)
        has_envelope = ("params", "_meta", REVISION_KEY) in members and SESSION_ID not in self.headers
        if has_envelope or (revision is not None and revision not in REVISIONS_WITH_SESSIONS):
            self._post_without_session(payload, members, takes_events)
        else:
            self._post_to_session(payload, members, takes_events, owner)

    def _post_to_session(self, payload: Payload, members: Members, takes_events: bool, owner: str) -> None:
        is_greeting = members.method == "initialize" and members.key is not None and SESSION_ID not in self.headers
        session = self.front.sessions.open(owner) if is_greeting else self._find_session(owner)
        if members.method is None or members.key is None:
            session.send(payload, members)
            self._answer(202)
            return
        reader = session.request(payload, members, only_answer=not takes_events)
        revision = members.read("params", "protocolVersion") if is_greeting else header(self.headers, REVISION)
        is_resumable = revision == FIRST_RESUMABLE
        answer = StreamAnswer(self, reader, session, takes_events=takes_events, is_resumable=is_resumable)
        try:
            first = answer.wait()
            if is_greeting and first is not None and first.error_code is not None:
                self.answer_json(first.payload, 200)
            else:
                answer.send(first)
                is_greeting = False
        finally:
            reader.leave()
            if is_greeting:
                session.end("its greeting has failed")

    def _find_session(self, owner: str) -> HttpSession:
        id = header(self.headers, SESSION_ID)
        if id is None:
            raise HttpRefusal(400, "Bad Request: Missing session ID")
        session = self.front.sessions.find(id, owner)
        if session is None:
            raise HttpRefusal(404, "Session not found")
        return session

    def _post_without_session(self, payload: Payload, members: Members, takes_events: bool) -> None:
        if members.method is None:
            raise HttpRefusal(400, "the body must be one request or notification")
        if ("id",) not in members:
            problem = problem_with_revision(header(self.headers, REVISION) or "")
        else:
            problem = problem_with_headers(self.headers, members)
        if problem is None and members.method == "initialize":
            # It would fix a server of both generations to the other one.
            problem = METHOD_NOT_FOUND, "Method not found", None
        if problem is not None:
            payload.close()
            failure = error_payload(members.texts.get(("id",), b"null"), *problem)
            self.answer_json(failure, STATUS_OF_ERROR[problem[0]])
            return
        if ("id",) not in members:
            payload.close()
            self._answer(202)  # clients of this revision have none to send: closing the connection cancels
            return
        if members.method == LISTEN and not takes_events:
            raise HttpRefusal(406, f"accept {EVENT_TYPE}")
        shared = self.front.sessions.shared()
        self._check_param_headers(shared, members)
        reader = shared.request(payload, members, only_answer=not takes_events)
        answer = StreamAnswer(self, reader, None, takes_events=takes_events)
        try:
            answer.send(answer.wait())
        finally:
            if not reader.stream.is_ended:
                shared.cancel(reader.stream)
            shared.release(reader.stream)

    def _check_param_headers(self, shared: SharedSession, members: Members) -> None:
        tool = members.read("params", "name")
        if members.method != "tools/call" or not shared.param_headers.declares(tool):
            return
        path = ("params", "arguments")
        if path in members and path not in members.texts:
            raise HttpRefusal(400, "the arguments are too long to be compared with headers", code=HEADER_MISMATCH)
        problem = shared.param_headers.problem_with(tool, members.read(*path), self.headers)
        if problem is not None:
            raise HttpRefusal(400, problem, code=HEADER_MISMATCH)

    def _get(self, owner: str) -> None:
        self._discard_body()
        revision = header(self.headers, REVISION)
        if revision is not None and revision not in REVISIONS_WITH_SESSIONS:
            raise HttpRefusal(405, "there are no sessions in this revision", headers=[("Allow", "POST")])
        if not accepted_types(self.headers)[1]:
            raise HttpRefusal(406, f"accept {EVENT_TYPE}")
        session = self._find_session(owner)
        stream, after = session.other_messages, None
        if (last := header(self.headers, LAST_EVENT_ID)) is not None:
            number, _, event = last.partition("-")
            found = session.find_stream(int(number)) if number.isdecimal() and len(number) < 10 else None
            is_known = found is not None and event.isdecimal() and len(event) < 16 and found.can_resume(int(event))
            if found is None or not is_known:
                raise HttpRefusal(400, "this event is not known any more", code=INVALID_PARAMS)
            stream, after = found, int(event)
        self._expect(None)
        self.is_answering = True
        reader = stream.attach(after)
        try:
            StreamAnswer(self, reader, session, is_resumable=revision == FIRST_RESUMABLE).send(None)
        finally:
            reader.leave()

    def _delete(self, owner: str) -> None:
        self._discard_body()
        revision = header(self.headers, REVISION)
        if revision is not None and revision not in REVISIONS_WITH_SESSIONS:
            raise HttpRefusal(405, "there are no sessions in this revision", headers=[("Allow", "POST")])
        self._find_session(owner).end("the client has ended the session")
        self._answer(200)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_head()
        self.wfile.flush()

    def _answer_error(self, refusal: HttpRefusal) -> None:
        self.answer_json(error_payload(b"null", refusal.code, refusal.message), refusal.status, refusal.headers)

    def answer_json(self, payload: Payload, status: int, headers: HeaderLines = ()) -> None:
        self.send_response(status)
        self.send_header("Content-Type", JSON_TYPE)
        self.send_header("Content-Length", str(payload.size))
        for name, value in headers:
            self.send_header(name, value)
        self.end_head()
        for piece in payload.pieces():
            self.wfile.write(piece)
        self.wfile.flush()

    def end_head(self) -> None:
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
