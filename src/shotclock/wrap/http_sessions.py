"""Sessions of HTTP clients: one child for each of them, and one shared child for clients of 2026-07-28.

Over stdio nothing says which call a message of the server belongs to. Progress is found by its token; other messages
go to the only open call, or else to the stream that the client has opened for them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable

from ..core.clocks import NS_PER_MS
from ..core.value_types import entity, value
from ..process.clock import monotonic_ns
from .http_children import Notes, WrapChild
from .http_streams import Stream, StreamReader
from .members import Members
from .messages import LIST_CHANGES, LISTEN, Key, cancellation_line, encode, key_of
from .param_headers import ParamHeaders
from .payloads import Payload

INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
SERVER_GONE = -32000
REQUEST_CANCELLED = -32800  # the SDK's answer to a request that its client has cancelled
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
# Ended streams of a session, for clients that resume.
MOST_RECENT = 16
MOST_RECENT_SIZE = 64 * 1024 * 1024
LONGEST_LIST = 1024 * 1024  # of tools, whose declarations are read
_UNRELATED = frozenset({*LIST_CHANGES, "notifications/resources/updated"})


class HttpRefusal(Exception):
    """A request that is answered with an HTTP status and a JSON-RPC error."""

    def __init__(
        self, status: int, message: str, *, code: int = INVALID_REQUEST, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, tuple(headers)


@value
class FrontSettings:
    """Settings of the HTTP front."""

    child_argv: tuple[str, ...]
    most_sessions: int
    idle_ms: int
    end_within_ms: int


@entity
class OpenRequest:
    """A request that its server has not answered. With `only_answer` its client takes no other messages with it."""

    stream: Stream
    method: str
    only_answer: bool
    id_text: bytes
    token: Key | None = None
    token_text: bytes = b""


def error_payload(id_text: bytes, code: int, message: str, data: object = None) -> Payload:
    error: dict[str, object] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return Payload(b'{"jsonrpc":"2.0","id":' + id_text + b',"error":' + encode(error).rstrip() + b"}")


def _error_code(members: Members) -> int | None:
    """Return the code of an error answer; None for a result."""
    code = members.read("error", "code")
    return code if isinstance(code, int) else None


class HttpSession:
    """A child with its open requests. Ids and tokens of one client pass unchanged."""

    def __init__(self, id: str, owner: str, registry: HttpSessions) -> None:
        self.id = id
        self.owner = owner
        self.other_messages = Stream(0)
        self.used_ns = monotonic_ns()
        self.end_text = ""
        self._has_ended = False
        self._stderr = ""
        self._registry = registry
        self._lock = threading.Lock()
        self._open: dict[Key, OpenRequest] = {}
        self._streams: dict[int, Stream] = {}
        """Streams of open requests and of the latest ended ones, by number."""
        self._count = 0
        self.child = registry.start_child(self)

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def is_read(self) -> bool:
        """Return whether a client is connected to the stream of other messages."""
        return self.other_messages.is_read

    def request(self, payload: Payload, members: Members, *, only_answer: bool) -> StreamReader:
        """Send a request to the server and return the reader of its answer. Raises HttpRefusal."""
        key = members.key
        assert key is not None
        with self._lock:
            if key in self._open:
                raise HttpRefusal(400, "the id of this request belongs to another open request")
            reader = self._new_stream().attach()  # before the answer can come: a stream without a reader may be dropped
            token = key_of(members.read("params", "_meta", "progressToken"))
            request = OpenRequest(reader.stream, members.method or "", only_answer, members.texts[("id",)], token)
            self._open[key] = request
        self._pass(payload)
        return reader

    def _pass(self, payload: Payload) -> None:
        """Write a request to the child. One that is ending fails its requests at its end, with the reason."""
        if not self.child.send(payload) and self._has_ended:
            self._fail_all()

    def send(self, payload: Payload, members: Members) -> None:
        """Send a notification or an answer to the server."""
        self.used_ns = monotonic_ns()
        cancelled = None
        if members.method == "notifications/cancelled":
            cancelled = key_of(members.read("params", "requestId"))
        self.child.send(payload)
        if cancelled is not None and (request := self._close(cancelled)) is not None:
            # The server does not answer it any more, and the stream has to end.
            request.stream.put(error_payload(request.id_text, REQUEST_CANCELLED, "Request cancelled"), is_last=True)

    def find_stream(self, number: int) -> Stream | None:
        with self._lock:
            return self.other_messages if number == 0 else self._streams.get(number)

    def take(self, payload: Payload, members: Members) -> None:
        if members.method is None:
            key = members.key
            request = None if key is None else self._close(key)
            if request is not None:
                request.stream.put(payload, is_last=True, error_code=_error_code(members))
            elif key is None:
                self.other_messages.put(payload)
            else:
                payload.close()
        else:
            self._stream_of(members).put(payload)

    def _stream_of(self, members: Members) -> Stream:
        """Return the stream for a request or notification of the server."""
        if members.method in _UNRELATED:
            return self.other_messages
        with self._lock:
            requests = list(self._open.values())
        if members.method == "notifications/progress":
            token = key_of(members.read("params", "progressToken"))
            requests = [each for each in requests if token is not None and each.token == token] or requests
        if len(requests) == 1 and not requests[0].only_answer:
            return requests[0].stream
        return self.other_messages

    def _new_stream(self) -> Stream:
        self._count += 1
        stream = self._streams[self._count] = Stream(self._count)
        return stream

    def _close(self, key: Key) -> OpenRequest | None:
        """Close a request, and forget the oldest streams that have ended."""
        self.used_ns = monotonic_ns()
        with self._lock:
            request = self._open.pop(key, None)
            running = {each.stream for each in self._open.values()}
            ended = [each for each in self._streams.values() if each not in running and not each.is_read]
            while len(ended) > MOST_RECENT or sum(each.size for each in ended) > MOST_RECENT_SIZE:
                oldest = ended.pop(0)
                if request is not None and oldest is request.stream:
                    break
                del self._streams[oldest.number]
                oldest.close()
        return request

    def end(self, text: str, signal_number: int | None = None) -> None:
        """End the child. Open requests are answered with the text."""
        self.end_text = self.end_text or text
        self._registry.forget(self)
        self.other_messages.close()
        self.child.stop(signal_number)

    def child_ended(self, code: int, stderr: str) -> None:
        if not self.end_text:
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            last_line = stderr.rpartition("\n")[2][-500:]
            self.end_text = f"the process of this session {ended}" + (f": {last_line}" if last_line else "")
        self._registry.forget(self)
        self._stderr = stderr
        self._has_ended = True
        self._fail_all()
        self.other_messages.close()
        if lost := self.other_messages.lost:
            self._registry.note(
                f"{lost} messages of a server were dropped: they belonged to no open call, and no client read them"
            )

    def _fail_all(self) -> None:
        with self._lock:
            failed, self._open = list(self._open.values()), {}
        data = {"stderr": self._stderr} if self._stderr else None
        for request in failed:
            failure = error_payload(request.id_text, SERVER_GONE, f"shotclock: {self.end_text}", data)
            request.stream.put(failure, is_last=True, error_code=SERVER_GONE)


class SharedSession(HttpSession):
    """The child of all clients of 2026-07-28. Their ids and tokens are replaced on the way in, and back on the way out.

    A message that nothing connects with one call is dropped while several are open: it may be for one client only.
    """

    def __init__(self, registry: HttpSessions) -> None:
        self.param_headers = ParamHeaders()
        self._has_result = False
        super().__init__("", "", registry)

    def request(self, payload: Payload, members: Members, *, only_answer: bool) -> StreamReader:
        token_path = ("params", "_meta", "progressToken")
        with self._lock:
            reader = self._new_stream().attach()
            number = reader.stream.number
            request = OpenRequest(reader.stream, members.method or "", only_answer, members.texts[("id",)])
            payload.replace(members.spans[("id",)], b"%d" % number)
            if token_path in members:
                request.token, request.token_text = key_of(number), members.texts.get(token_path, b"null")
                payload.replace(members.spans[token_path], b"%d" % number)
            self._open[("int", number)] = request
        self._pass(payload)
        return reader

    def cancel(self, stream: Stream) -> None:
        """Cancel a request whose client has gone."""
        if self._close(("int", stream.number)) is not None:
            self.child.send(Payload(cancellation_line(stream.number, "the client has closed the connection").rstrip()))

    def release(self, stream: Stream) -> None:
        """Forget the stream of an answered request: there is no resuming."""
        with self._lock:
            self._streams.pop(stream.number, None)
        stream.close()

    def take(self, payload: Payload, members: Members) -> None:
        if members.method is None:
            self._take_answer(payload, members)
        elif ("id",) in members:
            payload.close()
            text = "there is no client to ask: requests to clients do not exist in 2026-07-28"
            self.child.send(error_payload(members.texts.get(("id",), b"null"), METHOD_NOT_FOUND, text))
        elif (request := self._request_of(members)) is not None:
            self._restore(payload, members, request, "params")
            request.stream.put(payload)
        else:
            payload.close()
            self.other_messages.lost += 1

    def _take_answer(self, payload: Payload, members: Members) -> None:
        request = None if members.key is None else self._close(members.key)
        if request is None:
            payload.close()
            return
        payload.replace(members.spans[("id",)], request.id_text)
        error_code = _error_code(members)
        if request.method == "tools/list" and payload.size <= LONGEST_LIST:
            self.param_headers.learn(b"".join(payload.pieces()))
        self._has_result = self._has_result or error_code is None
        self._restore(payload, members, request, "result")
        request.stream.put(payload, is_last=True, error_code=error_code)
        if not self._has_result and request.method == "server/discover" and self.is_idle:
            self.end("the server does not know 2026-07-28")  # its clients greet it in sessions of their own

    def _request_of(self, members: Members) -> OpenRequest | None:
        number = members.read("params", "progressToken")
        if number is None:
            number = members.read("params", "_meta", SUBSCRIPTION_ID)
        with self._lock:
            if number is not None:
                key = key_of(number)
                return None if key is None else self._open.get(key)
            calls = [each for each in self._open.values() if each.method != LISTEN and not each.only_answer]
        return calls[0] if len(calls) == 1 else None

    @staticmethod
    def _restore(payload: Payload, members: Members, request: OpenRequest, part: str) -> None:
        """Put the client's own token and id back."""
        if request.token is not None and (span := members.spans.get((part, "progressToken"))) is not None:
            payload.replace(span, request.token_text)
        if (span := members.spans.get((part, "_meta", SUBSCRIPTION_ID))) is not None:
            payload.replace(span, request.id_text)


class HttpSessions:
    """All sessions of a front."""

    def __init__(self, settings: FrontSettings, notes: Notes) -> None:
        self._settings = settings
        self._notes = notes
        self._lock = threading.Lock()
        self._by_id: dict[str, HttpSession] = {}
        self._shared: SharedSession | None = None
        self._children: set[WrapChild] = set()
        self._is_stopping = False

    def open(self, owner: str) -> HttpSession:
        """Start a child for a new session. Raises HttpRefusal."""
        with self._lock:
            most = self._settings.most_sessions
            displaced = self._find_unused(owner) if len(self._by_id) >= most else None
            is_full = len(self._by_id) >= most and displaced is None
            # Children that are still ending count, too, but not for the first ones to take their places.
            if self._is_stopping or is_full or len(self._children) > 2 * most:
                raise HttpRefusal(
                    503, f"all {most} sessions are in use", code=SERVER_GONE, headers=[("Retry-After", "5")]
                )
            session = HttpSession(secrets.token_urlsafe(24), owner, self)
            self._by_id[session.id] = session
            if displaced is not None:
                self._remove(displaced)
        session.child.start_reading()
        if displaced is not None:
            displaced.end("a newer session has taken its place")
        return session

    def _find_unused(self, owner: str) -> HttpSession | None:
        """Return the longest idle session of this owner that no client is connected to: many clients never end one."""
        unused = [each for each in self._by_id.values() if each.owner == owner and each.is_idle and not each.is_read]
        return min(unused, key=lambda each: each.used_ns, default=None)

    def find(self, id: str, owner: str) -> HttpSession | None:
        """Return a session of this owner. A session of another one does not exist for them."""
        with self._lock:
            session = self._by_id.get(id)
            if session is None or session.owner != owner:
                return None
            session.used_ns = monotonic_ns()
            return session

    def shared(self) -> SharedSession:
        """Return the shared session, and start its child if there is none. Raises HttpRefusal."""
        with self._lock:
            if self._is_stopping:
                raise HttpRefusal(503, "this server is being stopped", code=SERVER_GONE, headers=[("Retry-After", "5")])
            if self._shared is not None:
                self._shared.used_ns = monotonic_ns()
                return self._shared
            session = self._shared = SharedSession(self)
        session.child.start_reading()
        return session

    def start_child(self, session: HttpSession) -> WrapChild:
        """Start the child of a session. Raises HttpRefusal. Called with the lock held."""
        try:
            child = WrapChild(
                self._settings.child_argv,
                session,
                self._notes,
                self._settings.end_within_ms,
                lambda: self._children.discard(child),
            )
        except OSError as error:
            message = f"shotclock: cannot start a process: {error.strerror or error}"
            raise HttpRefusal(503, message, code=SERVER_GONE, headers=[("Retry-After", "5")]) from None
        self._children.add(child)
        return child

    def note(self, text: str) -> None:
        self._notes.say(text)

    def forget(self, session: HttpSession) -> None:
        with self._lock:
            self._remove(session)

    def _remove(self, session: HttpSession) -> None:
        if self._shared is session:
            self._shared = None
        if self._by_id.get(session.id) is session:
            del self._by_id[session.id]

    def end_idle(self) -> None:
        """End the sessions without a request for the idle limit."""
        if not self._settings.idle_ms:
            return
        since_ns = monotonic_ns() - self._settings.idle_ms * NS_PER_MS
        with self._lock:
            idle = [each for each in self._all() if each.is_idle and each.used_ns < since_ns]
            for session in idle:
                self._remove(session)
        for session in idle:
            session.end("the session was idle")

    def stop(self, signal_number: int, text: str) -> None:
        """Ask all children to end."""
        with self._lock:
            self._is_stopping = True
            sessions = self._all()
        for session in sessions:
            session.child.interrupt()
        for session in sessions:
            session.end(text, signal_number)

    def kill(self) -> None:
        for child in tuple(self._children):
            child.kill()

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    def _all(self) -> list[HttpSession]:
        return [*self._by_id.values(), *([] if self._shared is None else [self._shared])]
