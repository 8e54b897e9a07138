"""One client before several servers: the way of each message.

A call goes to the server that has the tool, without the prefix of its name; its answer passes unchanged. Every server
sees the ids of the client, because each request has one server. Requests of the servers get ids of ours towards the
client, because two servers may use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...core.clocks import NS_PER_MS
from ...core.errors import Ending
from ...core.value_types import record
from ...process.clock import monotonic_ns
from ...runtime.call import Effects
from ..failures import WrapFailure, failure_answer
from ..lines import LinePart, replace_value
from ..links import Note
from ..messages import (
    LISTEN,
    REVISION_KEY,
    JsonObject,
    Key,
    RpcMessage,
    cancellation_line,
    encode,
    envelope_of_protocol,
    key_of,
    notification_line,
    read_line,
)
from ..requests import NEVER_NS, ClientRequest, new_request
from ..writers import LineWriter
from .greeting import MergedGreeting, merged_caching
from .lists import KINDS, RESOURCES, TEMPLATES, ListReading, MergedKind
from .long_lines import MOST_GATHERED, ClientLongLine, ServerLongLine
from .routes import ROUTED_BY_HEAD, MergedRoutes, Route
from .server import LINE_STALL_MS, MergedServer
from .subscriptions import ACKNOWLEDGED, MergedSubscriptions

MOST_EARLY = 100
# Requests of servers that the client has not answered.
MOST_QUESTIONS = 1_000
_PARSE_ERROR, _INVALID_REQUEST, _INVALID_PARAMS = -32700, -32600, -32602


@record
class ServerQuestion:
    """A request of a server that the client has not answered."""

    server: MergedServer
    id: str | int
    token: object


class Merger:
    """The state of one client connection to several servers."""

    def __init__(self, servers: Sequence[MergedServer], client: LineWriter, note: Note) -> None:
        self._servers = servers
        self._client = client
        self._note = note
        self._greeting = MergedGreeting(servers, client, note, self._announce)
        self._routes = MergedRoutes(servers, note)
        self._subscriptions = MergedSubscriptions(client)
        self._early: list[RpcMessage] = []  # requests of a client that does not wait for the answer to its greeting
        self._open: dict[Key, tuple[MergedServer, ClientRequest]] = {}
        self._readings: dict[Key | None, ListReading] = {}
        self._asked: dict[str, ServerQuestion] = {}
        self._ask_count = 0
        self._client_line: ClientLongLine | None = None
        self._server_lines: dict[MergedServer, ServerLongLine] = {}
        self._piece_ns = 0
        self.line_owner: MergedServer | None = None  # whose long line is being passed to the client
        for server in servers:
            server.connect(self)

    # --- from the client -----------------------------------------------------------------------------------------

    def take_from_client(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._client_line = ClientLongLine(self, piece)
        elif part is not LinePart.WHOLE:
            if self._client_line is not None:
                self._client_line.add(part, piece)
        elif piece.lstrip()[:1] == b"[":
            self._refuse(None, _INVALID_REQUEST, "batches of messages are not passed on; send each as a line")
        elif piece.strip():
            self.take_client_message(read_line(piece))

    def take_client_message(self, message: RpcMessage | None) -> None:
        if message is None:
            self._refuse(None, _PARSE_ERROR, "a line that is no valid message was not passed on")
        elif message.is_request:
            self._take_request(message)
        elif message.is_answer:
            question = self._asked.pop(message.id, None) if isinstance(message.id, str) else None
            line = None if question is None else message.with_id(question.id)
            if question is not None and line is not None:
                question.server.send(line)
        else:
            self._take_client_notification(message)

    def _take_request(self, message: RpcMessage) -> None:
        if REVISION_KEY in message.meta and message.method != "server/discover":
            self._greeting.take_envelope()
        match message.method:
            case _ if message.key in self._open or message.key in self._readings:
                self._refuse(message.id, _INVALID_REQUEST, "another request with this id is open")
            case "initialize":
                self._greeting.take_initialize(message)
            case "server/discover":
                self._greeting.take_discover(message)
            case "ping":
                self._answer(message.id, {})
            case _ if self._greeting.is_pending and len(self._early) < MOST_EARLY:
                self._early.append(message)
            case "logging/setLevel":
                self._set_level(message)
            case method if method in KINDS:
                self._list(message, KINDS[method])
            case method if method == LISTEN:
                self._subscriptions.begin(message, [each for each in self._servers if each.is_ready])
            case _:
                self._route_request(message)

    def _answer(self, id: object, result: JsonObject) -> None:
        self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "result": result}))

    def _refuse(self, id: object, code: int, text: str) -> None:
        error = {"code": code, "message": f"shotclock: {text}"}
        self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "error": error}))

    def refuse_long(self, id: object) -> None:
        text = f"a message of more than {MOST_GATHERED} bytes does not name its server near its start"
        self._refuse(id, _INVALID_REQUEST, text)

    def _set_level(self, message: RpcMessage) -> None:
        """Set the log level of every server that has one, and answer when all have answered."""
        self._greeting.keep_level(message.params)
        waiting = {each for each in self._servers if each.is_ready and each.has("logging")}

        def finish(server: MergedServer, answer: RpcMessage | None) -> None:
            waiting.discard(server)
            if not waiting:
                self._answer(message.id, {})

        for server in list(waiting):
            server.ask("logging/setLevel", message.params, partial(finish, server))
        if not waiting:
            self._answer(message.id, {})

    def _list(self, message: RpcMessage, kind: MergedKind) -> None:
        def answer(reading: ListReading, objects: list[JsonObject]) -> None:
            caching = {"resultType": "complete", **merged_caching(reading.results)} if self._greeting.is_modern else {}
            self._answer(message.id, {kind.name: objects, **caching})

        if message.params.get("cursor") is not None:
            self._refuse(message.id, _INVALID_PARAMS, "the list has one page, so there is no such cursor")
        else:
            self._read_list(kind, message, answer)

    def _read_list(
        self, kind: MergedKind, message: RpcMessage, then: Callable[[ListReading, list[JsonObject]], None]
    ) -> None:
        def finish(reading: ListReading) -> None:
            del self._readings[message.key]
            then(reading, self._routes.merge(reading))

        for server in self._servers:
            server.start_if_needed()
        reading = ListReading(kind, self._servers, envelope_of_protocol(message.meta), self._note, finish)
        self._readings[message.key] = reading
        reading.begin()

    def _route_request(self, message: RpcMessage, *, has_read_lists: bool = False) -> None:
        def route_again(reading: ListReading, objects: list[JsonObject]) -> None:
            self._route_request(message, has_read_lists=True)

        route = self._routes.find(message)
        if isinstance(route, Route):
            is_sent = route.server.is_ready and not route.server.is_stalled(monotonic_ns())
            if is_sent:
                route.server.send(route.line)
            self.note_sent(route.server, message, is_sent=is_sent)
        elif route.may_be_listed and not has_read_lists:
            self._read_list(RESOURCES, message, lambda *_: self._read_list(TEMPLATES, message, route_again))
        else:
            self._refuse(message.id, _INVALID_PARAMS, route.why)

    def find_route(self, message: RpcMessage) -> Route | None:
        if message.is_answer:
            question = self._asked.pop(message.id, None) if isinstance(message.id, str) else None
            line = None if question is None else message.with_id(question.id)
            return None if question is None or line is None else Route(question.server, line)
        found = self._routes.find(message) if message.method in ROUTED_BY_HEAD else None
        return found if isinstance(found, Route) else None

    def note_sent(self, server: MergedServer, message: RpcMessage, *, is_sent: bool) -> None:
        """Open a request, or answer one that could not be sent."""
        request = new_request(message, monotonic_ns())
        request.line = b""  # the wrap of the server repeats what may be repeated
        if request.is_call:
            request.effects = Effects()
        request.limits = server.entry.limits.of(request.method, request.tool.removeprefix(server.entry.prefix))
        if not is_sent:
            server.start_if_needed()
            why = "could not take its message" if server.is_ready else server.why
            failure = WrapFailure(
                "SERVICE_UNAVAILABLE", f"was not sent: the server {server.name} {why}", Ending.NOT_STARTED
            )
            if server.exit_code is not None:
                failure.code, failure.advice = "CONNECT_FAILED", "Another call fails in the same way: use other tools"
            self._fail(request, failure)
            return
        self._open[request.key] = server, request
        server.expect(request.key, request.method, request.limits)
        if message.method in ("resources/subscribe", "resources/unsubscribe"):
            self._greeting.keep_subscription(server, message)

    def _fail(self, request: ClientRequest, failure: WrapFailure) -> None:
        _, line = failure_answer(request, failure, is_modern=self._greeting.is_modern)
        self._client.write_line(line)

    def _take_client_notification(self, message: RpcMessage) -> None:
        match message.method:
            case "notifications/initialized":
                self._greeting.take_initialized(message.line)
            case "notifications/cancelled":
                self._cancel(message)
            case "notifications/progress":
                token = message.params.get("progressToken")
                question = self._asked.get(token) if isinstance(token, str) else None
                if question is not None:
                    line = replace_value(message.line, ("params", "progressToken"), question.token)
                    question.server.send(line or message.line)
            case str(method) if method.startswith("notifications/"):  # not a call without an id
                for server in self._servers:
                    if server.is_ready:
                        server.send(message.line)

    def _cancel(self, message: RpcMessage) -> None:
        key = key_of(message.params.get("requestId"))
        if key is None:
            return
        self._early = [each for each in self._early if each.key != key]
        if (reading := self._readings.pop(key, None)) is not None:
            reading.is_over = True
        self._subscriptions.cancel(key, message.line)
        if key in self._open:
            server, _ = self._open.pop(key)
            server.expect_no_more(key)
            server.send(message.line)

    # --- from a server -------------------------------------------------------------------------------------------

    def take_from_server(self, server: MergedServer, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._server_lines[server] = ServerLongLine(self, server, piece)
        elif part is not LinePart.WHOLE:
            line = self._server_lines.pop(server) if part is LinePart.END else self._server_lines[server]
            line.add(part, piece)
        elif (message := read_line(piece)) is not None:
            self.take_server_message(server, message)

    def take_server_message(self, server: MergedServer, message: RpcMessage) -> None:
        if message.is_answer:
            if server.is_own(message.id):
                server.take_own_answer(message)
            elif self._subscriptions.is_open(message.key):
                self._subscriptions.take_answer(server, message)
            elif message.key is None or self.note_answered(server, message):
                self._client.write_line(message.line)
        elif message.is_request:
            self._client.write_line(self.open_question(server, message))
        else:
            self._take_server_notification(server, message)

    def note_answered(self, server: MergedServer, message: RpcMessage) -> bool:
        """Close a request. Return False if the client does not wait for its answer by this server."""
        if message.key is None or self._open.get(message.key, (None,))[0] is not server:
            return False
        del self._open[message.key]
        server.expect_no_more(message.key)
        self._routes.note_task(server, message.result)
        return True

    def open_question(self, server: MergedServer, message: RpcMessage) -> bytes:
        """Return the line of a request of a server, with an id and a progress token of ours."""
        new_id = self.new_question(server, message.id, message.meta.get("progressToken"))
        line = message.with_id(new_id) or message.line
        if "progressToken" in message.meta:
            line = replace_value(line, ("params", "_meta", "progressToken"), new_id) or line
        return line

    def new_question(self, server: MergedServer, id: object, token: object) -> str:
        self._ask_count += 1
        new_id = f"{server.name}-{self._ask_count}"
        if isinstance(id, str | int):
            self._asked[new_id] = ServerQuestion(server, id, token)
            if len(self._asked) > MOST_QUESTIONS:
                del self._asked[next(iter(self._asked))]
        return new_id

    def _take_server_notification(self, server: MergedServer, message: RpcMessage) -> None:
        line = message.line
        if message.method == ACKNOWLEDGED:
            self._subscriptions.take_acknowledgement(server, message)
            return
        if message.method == "notifications/cancelled":
            cancelled = key_of(message.params.get("requestId"))
            found = (id for id, each in self._asked.items() if each.server is server and key_of(each.id) == cancelled)
            new_id = next(found, None)
            if new_id is None:  # not a request of this server, which must not cancel those of others
                self._subscriptions.end(server, cancelled)
                return
            del self._asked[new_id]
            line = notification_line(message.method, {**message.params, "requestId": new_id})
        self._client.write_line(line)

    def pass_piece(self, server: MergedServer, part: LinePart, piece: bytes) -> None:
        if self.line_owner not in (None, server):
            return  # the last words of a server, while the client is being left
        self._client.write_piece(part, piece)
        self._piece_ns = monotonic_ns()
        self.line_owner = None if part is LinePart.END else server

    # --- processes of the servers --------------------------------------------------------------------------------

    def note_started(self, server: MergedServer) -> None:
        self._greeting.note_started(server)
        if self._greeting.is_modern:
            self._subscriptions.repeat(server)

    def note_ended(self, server: MergedServer) -> None:
        """Answer the requests in flight, and withdraw the questions of a server whose process has ended."""
        self._server_lines.pop(server, None)
        if self.line_owner is server:
            self.line_owner = None
            self._client.break_line()
        if self._client_line is not None:
            self._client_line.lose(server)
        if not server.is_closing:
            what = f"was lost: the server {server.name} {server.why}"
            for key, (owner, request) in list(self._open.items()):
                if owner is server:
                    del self._open[key]
                    self._fail(request, WrapFailure("CONNECTION_LOST", what, Ending.ABANDONED))
            for id, question in list(self._asked.items()):
                if question.server is server:
                    del self._asked[id]
                    self._client.write_line(cancellation_line(id, "the server that asked is gone"))
            self._subscriptions.lose(server)
        self._greeting.note_ended(server)

    def _announce(self, kinds: Sequence[str]) -> None:
        if self._greeting.is_modern:
            self._subscriptions.announce(kinds)
            return
        for kind in kinds:
            self._client.write_line(notification_line(f"notifications/{kind}/list_changed"))

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        line_ns = NEVER_NS if self.line_owner is None else self._piece_ns + LINE_STALL_MS * NS_PER_MS
        own_ns = min(self._greeting.next_due_ns, self._subscriptions.next_due_ns)
        return min(own_ns, line_ns, *(each.due_ns for each in self._readings.values()))

    def check(self, now_ns: int) -> None:
        self._greeting.check(now_ns)
        if self._early and not self._greeting.is_pending:
            early, self._early = self._early, []
            for message in early:
                self._take_request(message)
        self._subscriptions.check(now_ns)
        if self.line_owner is not None and now_ns >= self._piece_ns + LINE_STALL_MS * NS_PER_MS:
            self._piece_ns = now_ns
            if not self._client.has_unwritten:  # otherwise the client is slow
                self.line_owner.kill("stopped in the middle of a line")
        for reading in list(self._readings.values()):
            reading.check(now_ns)
