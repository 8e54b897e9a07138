"""Sessions of HTTP clients: one child for each of them, and one shared child for clients of 2026-07-28.

Over stdio nothing says which call a message of the server belongs to. Progress is found by its token; other messages
go to the only open call, or else to the stream that the client has opened for them.
"""

from __future__ import annotations

import secrets
import threading
from typing import TypeVar

from ...core.clocks import NS_PER_MS
from ...core.value_types import entity, value
from ...process.clock import monotonic_ns
from ..lines import replace_value
from ..mcp_headers import DeclaredHeaders
from ..messages import LIST_CHANGES, LISTEN, Key, RpcMessage, cancellation_line, error_of, key_of, read_line
from .children import Notes, WrapChild
from .outbox import Outbox, Parcel, error_parcel
from .request_check import METHOD_NOT_FOUND, HttpRefusal

SERVER_GONE = -32000
REQUEST_CANCELLED = -32800  # the SDK's answer to a request that its client has cancelled
SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId"
# Answered requests of a session, for clients that resume.
MOST_RECENT = 4
MOST_RECENT_SIZE = 64 * 1024 * 1024  # of unsent messages
LONGEST_LIST = 1024 * 1024  # of tools, whose declarations are read
_UNRELATED = frozenset({*LIST_CHANGES, "notifications/resources/updated"})


@value
class FrontSettings:
    """Settings of the HTTP front."""

    child_argv: tuple[str, ...]
    most_sessions: int
    idle_ms: int
    end_within_ms: int


@entity
class PostedRequest:
    """A request that its server has not answered. With `only_answer` its client takes no other messages with it."""

    id: object
    method: str
    only_answer: bool
    token: object  # for progress
    outbox: Outbox
    reader: object


class HttpSession:
    """A child with its open requests. Ids and tokens of one client pass unchanged."""

    def __init__(self, key: str, owner: str, registry: HttpSessions) -> None:
        self.key = key
        self.id = key
        self.owner = owner
        self.other_messages: Outbox = Outbox("0")
        self.used_ns: int = monotonic_ns()
        self._end_text = ""
        self._has_ended = False
        self._stderr = ""
        self._registry = registry
        self._lock = threading.Lock()
        self._open: dict[Key, PostedRequest] = {}
        self._count = 0  # of requests
        self._outboxes = {"0": self.other_messages}
        """Those of open requests, and of the last ones that were answered."""
        self.child: WrapChild = registry.start_child(self)

    @property
    def is_idle(self) -> bool:
        return not self._open

    def request(self, message: RpcMessage, *, only_answer: bool) -> PostedRequest:
        """Send a request to the server. Raises HttpRefusal."""
        with self._lock:
            if message.key is None or message.key in self._open:
                raise HttpRefusal(400, "the id of this request belongs to another open request")
            self._count += 1
            request = self._open[message.key] = _posted(message, only_answer, str(self._count))
            self._outboxes[request.outbox.number] = request.outbox
        self._pass(message.line)
        return request

    def _pass(self, line: bytes) -> None:
        """Write a request to the child. One that is ending fails its requests at its end, with the reason."""
        if not self.child.send(line) and self._has_ended:
            self._fail_all()

    def leave(self, request: PostedRequest) -> None:
        """Keep the messages of a request for a while: its client may only have lost its connection, and resume."""
        request.outbox.detach(request.reader)
        with self._lock:
            running = [self.other_messages, *(each.outbox for each in self._open.values())]
            ended = [each for each in self._outboxes.values() if each not in running and not each.is_read]
            while len(ended) > MOST_RECENT or sum(each.size for each in ended) > MOST_RECENT_SIZE:
                oldest = ended.pop(0)
                del self._outboxes[oldest.number]
                oldest.close()

    def find_outbox(self, number: str) -> Outbox | None:
        with self._lock:
            return self._outboxes.get(number)

    def send(self, message: RpcMessage) -> None:
        """Send a notification or an answer to the server."""
        self.child.send(message.line)
        if message.method == "notifications/cancelled":
            request = self._close(key_of(message.params.get("requestId")))
            if request is not None:  # the server does not answer it any more
                request.outbox.put(error_parcel(request.id, REQUEST_CANCELLED, "Request cancelled"), is_last=True)

    def take(self, parcel: Parcel, message: RpcMessage) -> None:
        if message.method is not None:
            self._outbox_of(message).put(parcel)
        elif message.key is None:
            self.other_messages.put(parcel)
        elif (request := self._close(message.key)) is not None:
            parcel.error_code = _error_code(message)
            request.outbox.put(parcel, is_last=True)
        else:
            parcel.close()

    def _outbox_of(self, message: RpcMessage) -> Outbox:
        """Return the place for a request or notification of the server."""
        with self._lock:
            requests = list(self._open.values())
        if message.method == "notifications/progress":
            token = key_of(message.params.get("progressToken"))
            requests = [each for each in requests if token is not None and key_of(each.token) == token] or requests
        is_related = message.method not in _UNRELATED and len(requests) == 1 and not requests[0].only_answer
        return requests[0].outbox if is_related else self.other_messages

    def _close(self, key: Key | None) -> PostedRequest | None:
        self.used_ns = monotonic_ns()
        with self._lock:
            return None if key is None else self._open.pop(key, None)

    def end(self, text: str, signal_number: int | None = None) -> None:
        """End the child. Open requests are answered with the text."""
        self._end_text = self._end_text or text
        self._registry.forget(self)
        self.other_messages.close()
        self.child.stop(signal_number)

    def child_ended(self, code: int, stderr: str) -> None:
        if not self._end_text:
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            last_line = stderr.rpartition("\n")[2][-500:]
            self._end_text = f"the process of this session {ended}" + (f": {last_line}" if last_line else "")
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
            failure = error_parcel(request.id, SERVER_GONE, f"shotclock: {self._end_text}", data)
            request.outbox.put(failure, is_last=True)


def _posted(message: RpcMessage, only_answer: bool, number: str = "") -> PostedRequest:
    outbox = Outbox(number)
    token = message.meta.get("progressToken")
    return PostedRequest(message.id, message.method or "", only_answer, token, outbox, outbox.attach())


def _error_code(message: RpcMessage) -> int | None:
    """Return the code of an error answer; None for a result."""
    code = error_of(message).get("code")
    return code if isinstance(code, int) else None


class SharedSession(HttpSession):
    """The child of all clients of an owner that speak 2026-07-28. Their ids and tokens are replaced on the way in.

    A message that nothing connects with one call is dropped while several are open: it may be for one client only.
    """

    def __init__(self, key: str, owner: str, registry: HttpSessions) -> None:
        self.declared_headers: DeclaredHeaders = DeclaredHeaders()
        super().__init__(key, owner, registry)
        self.id = ""

    def request(self, message: RpcMessage, *, only_answer: bool) -> PostedRequest:
        request = _posted(message, only_answer)
        with self._lock:
            self._count += 1
            number = self._count
        line = _with_number(message, number)
        with self._lock:
            self._open[("int", number)] = request
        self._pass(line)
        return request

    def leave(self, request: PostedRequest) -> None:
        """Cancel a request whose client has gone."""
        request.outbox.close()
        with self._lock:
            key = next((key for key, each in self._open.items() if each is request), None)
        if key is not None and self._close(key) is not None:
            self.child.send(cancellation_line(key[1], "the client has closed the connection").rstrip())

    def take(self, parcel: Parcel, message: RpcMessage) -> None:
        if message.method is None:
            self._take_answer(parcel, message)
        elif message.key is not None:
            parcel.close()
            text = "there is no client to ask: requests to clients do not exist in 2026-07-28"
            self.child.send(error_parcel(message.id, METHOD_NOT_FOUND, text).begin)
        elif (request := self._request_of(message)) is not None:
            parcel.replace(("params", "progressToken"), request.token)
            parcel.replace(("params", "_meta", SUBSCRIPTION_ID), request.id)
            request.outbox.put(parcel)
        else:
            parcel.close()
            self.other_messages.lost += 1

    def _take_answer(self, parcel: Parcel, message: RpcMessage) -> None:
        request = self._close(message.key)
        if request is None:
            parcel.close()
            return
        if request.method == "tools/list" and parcel.size <= LONGEST_LIST:
            self.declared_headers.learn(b"".join(parcel.pieces()))
        parcel.replace(("id",), request.id)
        parcel.replace(("result", "_meta", SUBSCRIPTION_ID), request.id)
        parcel.error_code = _error_code(message)
        request.outbox.put(parcel, is_last=True)

    def _request_of(self, message: RpcMessage) -> PostedRequest | None:
        meta = message.params.get("_meta")
        number = message.params.get("progressToken")
        if number is None and isinstance(meta, dict):
            number = meta.get(SUBSCRIPTION_ID)
        key = key_of(number)
        with self._lock:
            if key is not None:
                return self._open.get(key)
            calls = [each for each in self._open.values() if each.method != LISTEN]
        return calls[0] if len(calls) == 1 else None


def _with_number(message: RpcMessage, number: int) -> bytes:
    """Return a request with a number in place of its id and its token. Raises HttpRefusal."""
    line = message.with_id(number)
    if line is not None and "progressToken" in message.meta:
        line = replace_value(line, ("params", "_meta", "progressToken"), number)
    changed = None if line is None else read_line(line)
    # Of equal names in one object only the first was replaced, and a server may take the other one.
    if changed is None or changed.key != ("int", number) or changed.meta.get("progressToken") not in (None, number):
        raise HttpRefusal(400, "the id or the progress token of this request is there twice")
    return changed.line


AnySession = TypeVar("AnySession", bound=HttpSession)


class HttpSessions:
    """All sessions of a front."""

    def __init__(self, settings: FrontSettings, notes: Notes) -> None:
        self._settings = settings
        self._notes = notes
        self._lock = threading.Lock()
        self._by_key: dict[str, HttpSession] = {}
        self._children: set[WrapChild] = set()
        self._is_stopping = False

    def open(self, owner: str) -> HttpSession:
        """Start a child for a new session. Raises HttpRefusal."""
        return self._find_or_start(HttpSession, secrets.token_urlsafe(24), owner)

    def shared(self, owner: str) -> SharedSession:
        """Return the shared session of an owner, and start its child if there is none. Raises HttpRefusal."""
        return self._find_or_start(SharedSession, f"shared {owner}", owner)

    def find(self, id: str, owner: str) -> HttpSession | None:
        """Return a session of this owner. A session of another one does not exist for them."""
        with self._lock:
            session = self._by_key.get(id)
            if session is None or session.id != id or session.owner != owner:
                return None
            session.used_ns = monotonic_ns()
            return session

    def _find_or_start(self, kind: type[AnySession], key: str, owner: str) -> AnySession:
        with self._lock:
            if isinstance(found := self._by_key.get(key), kind):
                found.used_ns = monotonic_ns()
                return found
            most = self._settings.most_sessions
            is_full = len(self._by_key) >= most
            displaced = self._find_unused(owner) if is_full else None
            # Children that are still ending count, too, but not for the first ones to take their places.
            if self._is_stopping or (is_full and displaced is None) or len(self._children) > 2 * most:
                raise _unavailable(f"all {most} sessions are in use")
            session = self._by_key[key] = kind(key, owner, self)
            if displaced is not None:
                del self._by_key[displaced.key]
        session.child.start_reading()
        if displaced is not None:
            displaced.end("a newer session has taken its place")
        return session

    def _find_unused(self, owner: str) -> HttpSession | None:
        """Return the longest idle session of this owner that no client is connected to: many clients never end one."""
        sessions = [each for each in self._by_key.values() if each.owner == owner]
        unused = [each for each in sessions if each.is_idle and not each.other_messages.is_read]
        return min(unused, key=lambda each: each.used_ns, default=None)

    def start_child(self, session: HttpSession) -> WrapChild:
        """Start the child of a session. Raises HttpRefusal. Called with the lock held."""
        settings = self._settings
        try:
            child = WrapChild(settings.child_argv, session, self._notes, settings.end_within_ms, self._children.discard)
        except OSError as error:
            raise _unavailable(f"shotclock: cannot start a process: {error.strerror or error}") from None
        self._children.add(child)
        return child

    def note(self, text: str) -> None:
        self._notes.say(text)

    def forget(self, session: HttpSession) -> None:
        with self._lock:
            if self._by_key.get(session.key) is session:
                del self._by_key[session.key]

    def end_idle(self) -> None:
        """End the sessions without a request for the idle limit."""
        if not self._settings.idle_ms:
            return
        since_ns = monotonic_ns() - self._settings.idle_ms * NS_PER_MS
        with self._lock:
            idle = [each for each in self._by_key.values() if each.is_idle and each.used_ns < since_ns]
            for session in idle:
                del self._by_key[session.key]
        for session in idle:
            session.end("the session was idle")

    def stop(self, signal_number: int, text: str) -> None:
        """Ask all children to end."""
        with self._lock:
            self._is_stopping = True
            sessions = list(self._by_key.values())
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


def _unavailable(message: str) -> HttpRefusal:
    return HttpRefusal(503, message, code=SERVER_GONE, headers=[("Retry-After", "5")])
