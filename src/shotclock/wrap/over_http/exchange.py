"""Requests of MCP over HTTP: passed to the child of a session, or to the shared one, and answered.

In a session the answer is the last event of a stream, as from the SDK's servers, unless it is long and comes first:
clients limit the size of an event. Without one it is JSON if it comes first and in time, because that has a status.
"""

from __future__ import annotations

import json

from ...core.clocks import NS_PER_MS
from ...process.clock import monotonic_ns
from ..mcp_headers import EVENT_TYPE, JSON_TYPE, LAST_EVENT_ID, REVISION, SESSION
from ..messages import LISTEN, REVISION_KEY, RpcMessage, read_line
from .connection import HttpConnection
from .outbox import Outbox, Parcel
from .request_check import (
    FIRST_RESUMABLE,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    PARSE_ERROR,
    REVISIONS_WITH_SESSIONS,
    STATUS_OF_ERROR,
    HttpRefusal,
    accepted_types,
    check_message,
    header,
    is_json,
)
from .sessions import HttpSession, PostedRequest

# For an answer to come first. After that, events begin.
ANSWER_WITHIN_MS = 15_000
PING_MS = 15_000
RETRY_MS = 1_000  # for a client that resumes
LOOK_S = 1.0  # how often a connection looks whether its client has gone
# A line must have no end inside. Between the members of a message a space is the same, and in a string there is none.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class McpConnection(HttpConnection):
    """A connection of an MCP client."""

    def do_POST(self) -> None:
        self.handle_admitted(self._post)

    def do_GET(self) -> None:
        self.handle_admitted(self._get)

    def do_DELETE(self) -> None:
        self.handle_admitted(self._delete)

    # --- messages --------------------------------------------------------------------------------------------------

    def _post(self, owner: str) -> None:
        takes_json, takes_events = accepted_types(self.headers)
        if not takes_json:
            raise HttpRefusal(406, f"accept {JSON_TYPE} and {EVENT_TYPE}")
        if not is_json(self.headers):
            raise HttpRefusal(415, f"send {JSON_TYPE}")
        posted = self._pass_body(owner, takes_events)
        if posted is None:
            self.answer_empty(202)
        else:
            self._answer(*posted, takes_events=takes_events)

    def _pass_body(self, owner: str, takes_events: bool) -> tuple[HttpSession, PostedRequest] | None:
        """Pass a message on; return the request that it is. Raises HttpRefusal."""
        with self.body() as body:
            message = _read_message(body.translate(_ONE_LINE) if b"\n" in body or b"\r" in body else body)
            if self._has_no_session(message):
                return self._pass_to_shared(message, takes_events, owner)
            is_greeting = message.method == "initialize" and message.is_request and SESSION not in self.headers
            session = self.parts.sessions.open(owner) if is_greeting else self._find_session(owner)
            if message.is_request:
                return session, session.request(message, only_answer=not takes_events)
            session.send(message)
            return None

    def _has_no_session(self, message: RpcMessage | None = None) -> bool:
        """Return whether a request is of a revision without sessions."""
        if message is not None and REVISION_KEY in message.meta and SESSION not in self.headers:
            return True
        revision = header(self.headers, REVISION)
        return revision is not None and revision not in REVISIONS_WITH_SESSIONS

    def _find_session(self, owner: str) -> HttpSession:
        id = header(self.headers, SESSION)
        if id is None:
            raise HttpRefusal(400, "Bad Request: Missing session ID")
        session = self.parts.sessions.find(id, owner)
        if session is None:
            raise HttpRefusal(404, "Session not found")
        return session

    def _pass_to_shared(
        self, message: RpcMessage, takes_events: bool, owner: str
    ) -> tuple[HttpSession, PostedRequest] | None:
        check_message(self.headers, message)
        if not message.is_request:
            return None  # clients of this revision have none to send: closing the connection cancels
        if message.method == LISTEN and not takes_events:
            raise HttpRefusal(406, f"accept {EVENT_TYPE}")
        shared = self.parts.sessions.shared(owner)
        if message.method == "tools/call":
            tool, arguments = str(message.params.get("name")), message.params.get("arguments")
            problem = shared.declared_headers.problem_with(tool, arguments, self.headers)
            if problem is not None:
                raise HttpRefusal(400, problem, code=HEADER_MISMATCH, id=message.id)
        return shared, shared.request(message, only_answer=not takes_events)

    def _get(self, owner: str) -> None:
        session = self._session_of_other(owner)
        if not accepted_types(self.headers)[1]:
            raise HttpRefusal(406, f"accept {EVENT_TYPE}")
        outbox, reader = session.other_messages, None
        if (last := header(self.headers, LAST_EVENT_ID)) is not None:
            number, _, event = last.partition("-")
            found = session.find_outbox(number)
            reader = None if found is None or not event.isdecimal() else found.resume(int(event[:18]))
            if found is None or reader is None:
                raise HttpRefusal(400, "this event is not known any more", code=INVALID_PARAMS)
            outbox = found
        reader = reader or outbox.attach()
        self.note_whole_request()
        try:
            self._begin_events(session, outbox)
            self._send_events(outbox, reader, None)
            self.end_events()
        finally:
            outbox.detach(reader)

    def _delete(self, owner: str) -> None:
        self._session_of_other(owner).end("the client has ended the session")
        self.answer_empty(200)

    def _session_of_other(self, owner: str) -> HttpSession:
        """Return the session of a request without a message. Raises HttpRefusal."""
        self.discard_body()
        if self._has_no_session():
            raise HttpRefusal(405, "there are no sessions in this revision", headers=[("Allow", "POST")])
        return self._find_session(owner)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, session: HttpSession, request: PostedRequest, *, takes_events: bool) -> None:
        # A new session of which the client learns nothing would stay until it is idle for too long.
        is_greeting = request.method == "initialize" and SESSION not in self.headers
        is_useless = is_greeting
        try:
            first = self._wait(request, takes_events)
            if is_greeting and self.is_client_gone:
                raise ConnectionError("the client has gone")
            code = None if first is None else first.error_code
            is_useless = is_greeting and code is not None
            headers = [(SESSION, session.id)] if session.id and not is_useless else []
            is_event = headers and takes_events and first is not None and not first.is_long
            if first is not None and first.is_last and not is_event:
                status = 200 if session.id or code is None else STATUS_OF_ERROR.get(code, 200)
                self.answer_json(first, status, headers)
            else:
                self._begin_events(session, request.outbox, first)
                if not self._send_events(request.outbox, request.reader, first):
                    raise ConnectionError("the client reads too slowly")  # an end without an answer would be untrue
                self.end_events()
        finally:
            session.leave(request)
            if is_useless:
                session.end("its greeting has failed")

    def _begin_events(self, session: HttpSession, outbox: Outbox, first: Parcel | None = None) -> None:
        """Send the headers and, before the first message, an event from which a client can resume."""
        self.begin_events([(SESSION, session.id)] if session.id else [])
        if session.id and header(self.headers, REVISION) == FIRST_RESUMABLE:
            at = outbox.sent if first is None else first.number - 1
            self.write_events(f"id: {outbox.number}-{at}\r\nretry: {RETRY_MS}\r\ndata:\r\n\r\n".encode())

    def _wait(self, request: PostedRequest, takes_events: bool) -> Parcel | None:
        """Return the first message if it comes in time. A client that takes no events waits for its answer."""
        give_up_ns = monotonic_ns() + ANSWER_WITHIN_MS * NS_PER_MS
        while True:
            parcel = request.outbox.take(request.reader, LOOK_S)
            if parcel is not None and (takes_events or parcel.is_last):
                return parcel
            if parcel is None and takes_events and monotonic_ns() >= give_up_ns:
                return None
            if request.outbox.is_over(request.reader) or self.is_client_gone:
                raise ConnectionError("the client has gone")

    def _send_events(self, outbox: Outbox, reader: object, parcel: Parcel | None) -> bool:
        """Send a message, if there is one already, and all that follow. Return whether the last one was an answer."""
        written_ns = monotonic_ns()
        while True:
            if parcel is not None:
                self.write_event(parcel, f"id: {outbox.number}-{parcel.number}\r\n" if outbox.number else "")
            if outbox.is_over(reader):
                return parcel is not None and parcel.is_last
            if parcel is None and monotonic_ns() - written_ns > PING_MS * NS_PER_MS:
                self.write_events(b": ping\r\n\r\n")
                written_ns = monotonic_ns()
            if not outbox.has_waiting:
                self.wfile.flush()
            parcel = outbox.take(reader, LOOK_S)
            if parcel is None and self.is_client_gone:
                raise ConnectionError("the client has gone")


def _read_message(body: bytes) -> RpcMessage:
    """Return the message of a body. Raises HttpRefusal."""
    message = read_line(body)
    if message is None:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            raise HttpRefusal(400, "Parse error", code=PARSE_ERROR) from None
        raise HttpRefusal(400, "the body must be one JSON-RPC message, and no batch")
    if message.method is None:
        is_valid = message.is_answer
    elif message.method.startswith("notifications/"):
        is_valid = message.id is None
    else:
        is_valid = type(message.id) in (str, int)
    if not is_valid:
        raise HttpRefusal(400, "the body must be a request with an id, a notification or an answer")
    return message
