"""One client before several servers: the way of each message.

A call goes to the server that has the tool, without the prefix of its name; its answer passes unchanged. Every server
sees the ids of the client, because each request has one server. Requests of the servers get ids of ours towards the
client, because two servers may use the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..core.clocks import NS_PER_MS
from ..core.errors import Ending
from ..core.value_types import record, replace
from ..process.clock import monotonic_ns
from ..runtime.call import Effects
from .failures import WrapFailure, failure_answer
from .lines import LinePart, id_in_tail, replace_value
from .links import Note
from .merged_greeting import MergedGreeting
from .merged_lists import KINDS, ListReading, MergedDirectory, MergedKind
from .merged_long_line import LongLine
from .merged_routes import ROUTED_BY_HEAD, MergedRoutes, NoRoute, Route
from .merged_server import LINE_STALL_MS, MergedServer
from .merged_subscriptions import ACKNOWLEDGED, MergedSubscriptions
from .messages import (
    LISTEN,
    REVISION_KEY,
    JsonObject,
    Key,
    Message,
    cancellation_line,
    encode,
    envelope_of_protocol,
    key_of,
    notification_line,
    read_line,
    read_long_line,
)
from .requests import NEVER_NS, ClientRequest, new_request
from .writers import LineWriter

MOST_EARLY = 100
# Of a long message whose server is named only behind its large part.
MOST_GATHERED = 2 * 1024 * 1024
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
        self._directory = MergedDirectory(servers, note)
        self._routes = MergedRoutes(servers, self._directory)
        self._subscriptions = MergedSubscriptions(client)
        self._early: list[Message] = []  # requests of a client that does not wait for the answer to its greeting
        self._open: dict[Key, tuple[MergedServer, ClientRequest]] = {}
        self._readings: dict[Key | None, list[ListReading]] = {}
        self._asked: dict[str, ServerQuestion] = {}
        self._ask_count = 0
        self._client_long: Message | None = None
        self._client_route: Route | None = None
        self._client_gathered: bytearray | None = None
        self._piece_ns = 0
        self.line_owner: MergedServer | None = None  # whose long line is being passed to the client
        self._long: dict[MergedServer, LongLine] = {}
        for server in servers:
            server.connect(self)

    # --- from the client -----------------------------------------------------------------------------------------

    def take_from_client(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._begin_client_line(piece)
        elif part is not LinePart.WHOLE:
            self._continue_client_line(part, piece)
        elif (message := read_line(piece)) is not None:
            self._take_client_message(message)
        elif piece.lstrip()[:1] == b"[":
            self._refuse(None, _INVALID_REQUEST, "batches of messages are not passed on; send each as a line")
        elif piece.strip():
            self._refuse(None, _PARSE_ERROR, "a line that is no valid message was not passed on")

    def _take_client_message(self, message: Message) -> None:
        if message.is_request:
            self._take_request(message)
        elif message.is_answer:
            self._take_client_answer(message)
        elif message.method is not None:
            self._take_client_notification(message)

    def _take_request(self, message: Message) -> None:
        if REVISION_KEY in message.meta and message.method != "server/discover":
            self._greeting.take_envelope()
        match message.method:
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

    def _set_level(self, message: Message) -> None:
        """Set the log level of every server that has one, and answer when all have answered."""
        self._greeting.keep_level(message.params)
        having = [each for each in self._servers if each.is_ready and each.has("logging")]
        waiting = set(having)

        def finish(server: MergedServer, answer: Message | None) -> None:
            waiting.discard(server)
            if not waiting:
                self._answer(message.id, {})

        for server in having:
            server.ask("logging/setLevel", message.params, partial(finish, server))
        if not having:
            self._answer(message.id, {})

    def _list(self, message: Message, kind: MergedKind) -> None:
        if message.params.get("cursor") is not None:
            self._refuse(message.id, _INVALID_PARAMS, "the list has one page, so there is no such cursor")
            return

        def answer(reading: ListReading) -> None:
            self._readings.pop(message.key, None)
            self._answer(message.id, reading.result(self._directory, is_modern=self._greeting.is_modern))

        self._read_list(kind, message, answer)

    def _read_list(self, kind: MergedKind, message: Message, then: Callable[[ListReading], None]) -> None:
        for server in self._servers:
            self._greeting.want(server)
        meta = envelope_of_protocol(message.meta)
        reading = ListReading(kind, self._servers, meta, self._note, then)
        self._readings.setdefault(message.key, []).append(reading)
        reading.begin()

    def _read_lists_first(self, message: Message, kinds: Sequence[MergedKind]) -> None:
        """Route a request after reading lists that the client has not read."""
        left = {kind.name for kind in kinds}

        def finish(reading: ListReading) -> None:
            self._directory.take(reading)
            left.discard(reading.kind.name)
            if not left:
                self._readings.pop(message.key, None)
                self._route_request(message)

        for kind in kinds:
            self._read_list(kind, message, finish)

    def _route_request(self, message: Message) -> None:
        route = self._routes.find(message)
        if isinstance(route, NoRoute):
            if route.unread:
                self._read_lists_first(message, route.unread)
            else:
                self._refuse(message.id, _INVALID_PARAMS, route.why)
            return
        server = route.server
        if not server.is_ready:
            self._greeting.want(server)
        request = self._request_to(server, message)
        if not server.is_ready or server.is_stalled(request.arrived_ns):
            why = server.why if not server.is_ready else "does not read its messages"
            self._fail_unsent(request, server, why)
            return
        self._open[request.key] = server, request
        server.send(route.line)
        if message.method in ("resources/subscribe", "resources/unsubscribe"):
            self._greeting.keep_subscription(server, message)

    def _request_to(self, server: MergedServer, message: Message) -> ClientRequest:
        request = new_request(message, monotonic_ns())
        request.line = b""  # the wrap of the server repeats what may be repeated
        if request.is_call:
            request.effects = Effects()
        request.limits = server.entry.limits.of(request.method, request.tool.removeprefix(server.entry.prefix))
        return request

    def _fail_unsent(self, request: ClientRequest, server: MergedServer, why: str) -> None:
        what = f"was not sent: the server {server.name} {why}"
        failure = WrapFailure("SERVICE_UNAVAILABLE", what, Ending.NOT_STARTED)
        if server.exit_code is not None:
            failure.code, failure.advice = "CONNECT_FAILED", "Another call fails in the same way: use other tools"
        self._fail(request, failure)

    def _fail(self, request: ClientRequest, failure: WrapFailure) -> None:
        _, line = failure_answer(request, failure, is_modern=self._greeting.is_modern)
        self._client.write_line(line)

    # --- notifications and answers of the client -----------------------------------------------------------------

    def _take_client_notification(self, message: Message) -> None:
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
            case _:
                for server in self._servers:
                    if server.is_ready:
                        server.send(message.line)

    def _cancel(self, message: Message) -> None:
        key = key_of(message.params.get("requestId"))
        if key is None:
            return
        self._early = [each for each in self._early if each.key != key]
        for reading in self._readings.pop(key, []):
            reading.is_over = True
        self._subscriptions.cancel(key, message.line)
        found = self._open.pop(key, None)
        if found is not None:
            found[0].send(message.line)

    def _take_client_answer(self, message: Message) -> None:
        question = self._asked.pop(message.id, None) if isinstance(message.id, str) else None
        line = None if question is None else message.with_id(question.id)
        if question is not None and line is not None:
            question.server.send(line)

    # --- long lines of the client --------------------------------------------------------------------------------

    def _begin_client_line(self, head: bytes) -> None:
        message = self._client_long = read_long_line(head)
        self._client_route, self._client_gathered = None, bytearray()
        if message is None:
            return
        if message.is_answer and isinstance(message.id, str) and (question := self._asked.pop(message.id, None)):
            line = message.with_id(question.id)
            self._client_route = None if line is None else Route(question.server, line)
        elif message.method in ROUTED_BY_HEAD and not message.is_answer:
            found = self._routes.find(message)
            self._client_route = None if isinstance(found, NoRoute) else found  # its end may tell more
        if (route := self._client_route) is None:
            self._client_gathered += head
        elif route.server.is_ready:
            self._client_gathered = None
            route.server.send_piece(LinePart.START, route.line)

    def _continue_client_line(self, part: LinePart, piece: bytes) -> None:
        route, gathered = self._client_route, self._client_gathered
        if route is not None:
            self._continue_routed(route, part, piece, is_sent=gathered is None)
        elif gathered is not None and len(gathered) <= MOST_GATHERED:
            gathered += piece
        if part is not LinePart.END:
            return
        message, self._client_long, self._client_route, self._client_gathered = self._client_long, None, None, None
        if route is not None or gathered is None:
            return
        if len(gathered) <= MOST_GATHERED:
            self.take_from_client(LinePart.WHOLE, bytes(gathered))
        else:
            id = message.id if message is not None and message.key is not None else id_in_tail(piece)
            text = f"a message of more than {MOST_GATHERED} bytes does not name its server near its start"
            self._refuse(id, _INVALID_REQUEST, text)

    def _continue_routed(self, route: Route, part: LinePart, piece: bytes, *, is_sent: bool) -> None:
        """Pass a piece on. The request is open from its end on: before, the server could not begin with it."""
        message = self._client_long
        if is_sent:
            route.server.send_piece(part, piece)
        if part is not LinePart.END or message is None or message.is_answer:
            return
        if message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
        if message.key is None:
            return
        request = self._request_to(route.server, message)
        if is_sent:
            self._open[message.key] = route.server, request
        else:
            self._fail_unsent(request, route.server, "was not ready when it came")

    # --- from a server -------------------------------------------------------------------------------------------

    def take_from_server(self, server: MergedServer, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._long[server] = LongLine(self, server, piece)
        elif part is not LinePart.WHOLE:
            if (line := self._long.get(server)) is not None:
                line.add(part, piece)
        elif (message := read_line(piece)) is not None:
            self.take_server_message(server, message)

    def take_server_message(self, server: MergedServer, message: Message) -> None:
        if message.is_answer:
            if server.is_own(message.id):
                server.take_own_answer(message)
            elif self._subscriptions.is_open(message.key):
                self._subscriptions.take_answer(server, message)
            else:
                self._client.write_line(message.line)
                self.note_answered(server, message)
        elif message.is_request:
            self._client.write_line(self.open_question(server, message))
        else:
            self._take_server_notification(server, message)

    def note_answered(self, server: MergedServer, message: Message) -> None:
        if message.key is not None:
            self._open.pop(message.key, None)
        self._routes.note_result(server, message.result)

    def open_question(self, server: MergedServer, message: Message) -> bytes:
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
        return new_id

    def _take_server_notification(self, server: MergedServer, message: Message) -> None:
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

    def has_request_of_client(self, server: MergedServer) -> bool:
        return any(owner is server for owner, _ in self._open.values())

    def pass_piece(self, server: MergedServer, part: LinePart, piece: bytes) -> None:
        if self.line_owner not in (None, server):
            return  # the last words of a server, while the client is being left
        self._client.write_piece(part, piece)
        self._piece_ns = monotonic_ns()
        self.line_owner = None if part is LinePart.END else server

    def forget_long_line(self, server: MergedServer) -> None:
        self._long.pop(server, None)

    # --- processes of the servers --------------------------------------------------------------------------------

    def note_started(self, server: MergedServer) -> None:
        self._greeting.note_started(server)
        if self._greeting.is_modern:
            self._subscriptions.repeat(server)

    def note_ended(self, server: MergedServer) -> None:
        """Answer the requests in flight, and withdraw the questions of a server whose process has ended."""
        self.forget_long_line(server)
        if self.line_owner is server:
            self.line_owner = None
            self._client.break_line()
        if self._client_route is not None and self._client_route.server is server:
            self._client_gathered = bytearray()  # the rest is dropped, and answered at its end
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
        readings = (reading.due_ns for each in self._readings.values() for reading in each)
        line_ns = NEVER_NS if self.line_owner is None else self._piece_ns + LINE_STALL_MS * NS_PER_MS
        own_ns = min(self._greeting.next_due_ns, self._subscriptions.next_due_ns)
        return min(own_ns, line_ns, min(readings, default=NEVER_NS))

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
                self.line_owner.kill()
        for readings in list(self._readings.values()):
            for reading in list(readings):
                reading.check(now_ns)
