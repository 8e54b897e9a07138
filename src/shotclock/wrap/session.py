"""One client connection: the way of each message, over all processes of the server.

Messages pass as bytes. Each direction has ids of its own: the client's are never changed; those of a server that was
restarted are replaced by fresh ones, because it counts from the start again, and a late answer of the client would
otherwise be taken for the answer to another request. docs/design.md: R75.
"""

from __future__ import annotations

from ..core.clocks import NS_PER_MS, ClockKind
from ..core.errors import Ending
from ..core.value_types import replace
from ..process.clock import monotonic_ns
from ..runtime.call import Effects
from .catalogue import LastCatalogue
from .failures import WrapFailure
from .gate import Gate
from .guard import RequestGuard
from .large_results import LargeResult
from .limits import ServerLimits
from .lines import LinePart, id_in_tail, replace_id_in_tail
from .links import ClientLink, Note, ServerLink
from .messages import (
    LIST_CHANGES,
    LISTEN,
    Key,
    Message,
    cancellation_line,
    encode,
    key_of,
    notification_line,
    read_line,
    read_long_line,
)
from .replay import OWN_PREFIX, ReplayMemory
from .requests import (
    NEVER_NS,
    ClientRequest,
    OnEnded,
    RequestState,
    digest_of_arguments,
    new_request,
    outcome_of,
)

# Of a list of tools that is too long to be parsed as it passes, for the hints of its tools.
MOST_GATHERED = 1024 * 1024
MOST_TOOLS = 5_000
# Of an answer that has its id at the end, as long as it may be a list that is to be checked.
MOST_UNDECIDED = 64 * 1024 * 1024
# Bytes that wait for a server.
MOST_HELD = 2 * 1024 * 1024
# After a restart the server may announce the same change several times.
JOIN_CHANGES_MS = 300
# A server that stops in the middle of a line, or never ends it, blocks all other messages.
LINE_STALL_MS = 10_000
LINE_LIMIT_MS = 60_000
LINE_LOOK_MS = 100
LONGEST_NOISE = 2_000  # of a long line that is no message
STALE_ID = OWN_PREFIX + "stale"
_HINTS = ("readOnlyHint", "idempotentHint", "destructiveHint", "openWorldHint")


class ClientSession:
    """The state of one client connection."""

    def __init__(
        self,
        limits: ServerLimits,
        client: ClientLink,
        note: Note,
        *,
        gate: Gate | None = None,
        on_ended: OnEnded | None = None,
        catalogue: LastCatalogue | None = None,
    ) -> None:
        self.memory = ReplayMemory()
        self.guard = RequestGuard(limits, client, self.memory, note, on_ended)
        self.requests = self.guard.requests
        self.noise_lines = 0
        self._limits = limits
        self._client = client
        self._note = note
        self._gate = gate
        self._catalogue = catalogue
        self._held: list[Message | ClientRequest] = []
        self._held_size = 0
        self._parked: list[tuple[LinePart, bytes]] = []
        self._parked_ns = NEVER_NS
        self._tools: dict[str, dict[str, object]] = {}
        self._asked: dict[Key, str | int] = {}
        """Open requests of the server: ids as the client sees them, with those of the server."""
        self._client_long: Message | None = None
        self._client_size = self._server_size = 0  # of long lines
        self._drops_client_line = False
        self._server_long: Message | None = None
        self._drops_server_line = False
        self._gathered: bytearray | None = None
        self._large: LargeResult | None = None
        self._declares_output: set[str] = set()
        self._line_ns = self._piece_ns = NEVER_NS
        self._changes: set[str] = set()
        self._changes_ns = NEVER_NS
        self._is_server_older = False
        self._unscreened: bytearray | None = None  # a long answer that may be a list
        if gate is not None:
            gate.connect(self.guard, client, self.memory, note, list_ms=limits.list_ms, forward=self._forward)
            self.guard.on_approved_failed = gate.note_end

    def connect(self, server: ServerLink) -> None:
        self._server = server
        self.guard.connect(server)
        if self._gate is not None:
            self._gate.connect_server(server)

    @property
    def is_client_paused(self) -> bool:
        """Return whether nothing more of the client may be read until the server is ready."""
        return bool(self._parked) or self._held_size > MOST_HELD

    @property
    def has_held(self) -> bool:
        return bool(self._held or self._parked)

    @property
    def is_quiet(self) -> bool:
        """Return whether neither side waits for the other."""
        return not self.requests.has_waiting and not self._asked and self._client_long is None

    # --- from the client -----------------------------------------------------------------------------------------

    def take_from_client(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._begin_client_line(piece)
        elif part is not LinePart.WHOLE:
            self._continue_client_line(part, piece)
        elif (message := read_line(piece)) is None:
            self._pass_unread(piece)
        elif message.is_request:
            self._take_request(message)
        elif message.is_answer:
            self._take_client_answer(message)
        else:
            self._take_client_notification(message)

    def _pass_unread(self, line: bytes) -> None:
        """Pass a line that is no message, so that the server refuses it as it would without us."""
        if line.lstrip()[:1] == b"[":
            text = "shotclock: batches of messages are not passed on; send each message as a line of its own"
            self._client.write_line(encode({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": text}}))
        elif line.strip() and self._gate is not None:
            self._refuse_unread(None)
        elif line.strip() and self._server.accepts:
            self._server.send(line)

    def _refuse_unread(self, id: object) -> None:
        """Refuse a line that a tolerant server might take for a call."""
        text = "shotclock: a line that is no valid message, or too long to be checked, was not passed on"
        self._client.write_line(encode({"jsonrpc": "2.0", "id": id, "error": {"code": -32600, "message": text}}))

    def _take_request(self, message: Message) -> None:
        self.memory.note_client_message(message)
        if self._answer_from_catalogue(message):
            return
        request = self._open(message)
        if request is not None and (self._gate is None or self._gate.take(request, message)):
            self._forward(request)

    def _forward(self, request: ClientRequest) -> None:
        if self._server.accepts and not self._held:
            self._send(request)
        else:
            self._hold(request)

    def _answer_from_catalogue(self, message: Message) -> bool:
        """Answer a request as the server did the last time, as long as it has not spoken this time."""
        if self._catalogue is None or self._server.has_spoken or self._server.generation > 1:
            return False
        known = self._catalogue.find(message)
        if known is None or self._server.want() is not None:
            return False
        answer = read_line(encode({"jsonrpc": "2.0", "id": message.id, **known}))
        if answer is None:
            return False
        self._client.write_line(self._screen(new_request(message, monotonic_ns()), answer))
        result = known.get("result")
        if message.method == "initialize":
            self.memory.note_result(new_request(message, monotonic_ns()), result)
            self._server.greet()
        elif message.method == "tools/list":
            self._learn_tools(result)
        return True

    def keep_greeting(self, answer: Message) -> None:
        """Keep the answer to a greeting that we have sent."""
        if self._catalogue is not None and not answer.is_long:
            self._catalogue.keep(self.memory.initialize_line, answer)

    def _open(self, message: Message) -> ClientRequest | None:
        """Open a request; None if it is answered at once."""
        request = new_request(message, monotonic_ns())
        request.limits = self._limits.of(request.method, request.tool)
        if self._catalogue is not None and not self._server.has_spoken:  # its first start may take long
            request.limits = replace(request.limits, queue_ms=self._limits.start_up_ms)
        hints = self._tools.get(request.tool, {})
        if request.is_call:
            request.effects = Effects(hints.get("readOnlyHint") is not True, hints.get("idempotentHint") is True)
            request.digest = digest_of_arguments(message) if self.guard.is_recorded else None
            request.size = self._client_size if message.is_long else request.size
        self.guard.watch(request)
        unusable = self._refuse(message) or self._server.want()
        if unusable is not None:
            self.guard.fail(request, unusable)
        return request if self._is_open(request) else None  # the start may have failed already

    def _refuse(self, message: Message) -> WrapFailure | None:
        """Return why a long call may not be sent. Its arguments are not gathered."""
        return self._gate.refuse_long(message) if self._gate is not None and message.is_long else None

    def _hold(self, waiting: Message | ClientRequest) -> None:
        self._held.append(waiting)
        self._held_size += len(waiting.line)

    def _send(self, request: ClientRequest) -> None:
        if not self._server.accepts or not self._server.send(request.line):
            self._hold(request)
            return
        self.guard.note_sent(request)
        if not request.may_be_repeated:
            request.line = b""  # it is not needed again, and hundreds of open calls would keep theirs

    def _take_client_notification(self, message: Message) -> None:
        if self._gate is not None and self._gate.guards(message.method):
            self._refuse_unread(None)  # a call without an id
            return
        self.memory.note_client_message(message)
        if message.method == "notifications/cancelled":
            request = self.requests.find(key_of(message.params.get("requestId")))
            if request is None and not self._server.accepts:
                return
            if request is not None and self.guard.cancel(request):
                self._keep_held([each for each in self._held if each is not request])
                return
        if self._server.accepts and not self._held:
            self._server.send(message.line)
            self._list_if_stale()
        elif message.method == "notifications/initialized" and self.memory.greeting is not None:
            pass  # it follows the greeting that is being replayed
        elif self._server.want() is None:
            self._hold(message)

    def _take_client_answer(self, message: Message) -> None:
        server_id = self._close_question(message.key)
        if server_id is None and self._server.generation > 1:
            return  # an answer to a process that is gone
        line: bytes | None = message.line
        if server_id is not None and key_of(server_id) != message.key:
            line = message.with_id(server_id)
        if line is not None:
            self._server.send(line)

    def _close_question(self, key: Key | None) -> str | int | None:
        """Return the server's own id of a request that the client has answered; None if it is unknown."""
        server_id = None if key is None else self._asked.pop(key, None)
        self.guard.is_server_asking = bool(self._asked)
        self.guard.restart_idle_limits()
        return server_id

    def _begin_client_line(self, head: bytes) -> None:
        message = self._client_long = read_long_line(head)
        self._client_size = len(head)
        self._drops_client_line = False
        if message is not None and message.is_answer and message.key is not None and self._server.generation > 1:
            server_id = self._close_question(message.key)
            changed = None if server_id is None else message.with_id(server_id)
            self._drops_client_line = changed is None
            head = changed or head
        elif message is None or message.method is None:
            is_answer = message is not None and message.is_answer
            self._drops_client_line = not self._server.accepts or (self._gate is not None and not is_answer)
        elif self._refuse(message) is not None or self._server.want() is not None:
            self._drops_client_line = True
        elif not self._server.accepts or self._held:
            self._park(LinePart.START, head)
            return
        if not self._drops_client_line:
            self._server.send_piece(LinePart.START, head)

    def _park(self, part: LinePart, piece: bytes) -> None:
        """Keep pieces of a long request until the server is ready, and read no more of it."""
        if not self._parked and self._limits.call.queue_ms:
            self._parked_ns = monotonic_ns() + self._limits.call.queue_ms * NS_PER_MS
        self._parked.append((part, piece))

    def _continue_client_line(self, part: LinePart, piece: bytes) -> None:
        if self._parked:
            self._park(part, piece)
        elif part is LinePart.END:
            self._end_client_line(piece)
        else:
            self._client_size += len(piece)
            if not self._drops_client_line:
                self._server.send_piece(part, piece)

    def _end_client_line(self, piece: bytes) -> None:
        """Pass the end of a long line. A request is open from now on: before, the server could not begin with it."""
        message, self._client_long = self._client_long, None
        self._client_size += len(piece)
        if message is not None and message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
            if message.is_answer and self._server.generation > 1:
                server_id = self._close_question(message.key)
                piece = replace_id_in_tail(piece, STALE_ID if server_id is None else server_id) or piece
        if not self._drops_client_line:
            self._server.send_piece(LinePart.END, piece)
        if message is None or not message.is_request:
            if message is not None and message.is_answer:
                self._close_question(message.key)
            elif self._gate is not None:
                self._refuse_unread(None if message is None else message.id)
            return
        self.memory.note_client_message(message)
        request = self._open(message)
        if request is None:
            return
        if self._drops_client_line:
            what = "was not sent: the server was not ready when it came"
            self.guard.fail(request, WrapFailure("QUEUE_TIMEOUT", what, Ending.NOT_STARTED, ClockKind.QUEUE))
        else:
            self.guard.note_sent(request)

    # --- from the server -----------------------------------------------------------------------------------------

    def take_from_server(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._begin_server_line(piece)
        elif part is not LinePart.WHOLE:
            self._continue_server_line(part, piece)
        elif (message := read_line(piece)) is not None:
            self._take_server_message(message)
        elif piece.strip():
            self._take_noise(piece)

    def _take_noise(self, line: bytes) -> None:
        self.noise_lines += 1
        self._note(line.decode("utf-8", "replace").rstrip("\r\n"))

    def _take_server_message(self, message: Message) -> None:
        self._server.heard(message)
        if message.is_answer:
            self._take_server_answer(message)
        elif message.is_request:
            new_id = self._open_question(message.id)
            line = message.line if new_id is None else message.with_id(new_id)
            self._client.write_line(line or message.line)
        else:
            self._take_server_notification(message)

    def _open_question(self, server_id: object) -> str | None:
        """Note a request of the server. Return its new id; None in the first life, whose ids are unchanged."""
        if not isinstance(server_id, str | int):
            return None
        self.guard.is_server_asking = True
        if self._server.generation == 1:
            self._asked[type(server_id).__name__, server_id] = server_id
            return None
        fresh = self.memory.own_id(f"life{self._server.generation}")
        self._asked["str", fresh] = server_id
        return fresh

    def _take_server_answer(self, message: Message) -> None:
        request = self.requests.find(message.key)
        if message.key is None:  # an error about a line that could not be read
            self._client.write_line(message.line)
        elif isinstance(message.id, str) and message.id.startswith(OWN_PREFIX):
            if self._gate is not None:
                self._gate.take_own_answer(message)
        elif request is None or request.state is RequestState.HELD:
            if not self.requests.was_answered(message.key):
                self._note(f"shotclock: dropped an answer of the server with the unknown id {message.id!r}")
        elif request.is_call and not message.is_error and 0 < self._limits.result_bytes < len(message.line):
            large = LargeResult(self._limits.result_bytes)
            large.add(message.line)
            self._write_large(request, large)
            self._finish(request, message)
        elif request.state is not RequestState.STOPPING or not message.is_error:
            self._client.write_line(self._screen(request, message))  # first: the client can work while we note the end
            self._finish(request, message)
        self.guard.answer_stopping()

    def _screen(self, request: ClientRequest, message: Message) -> bytes:
        return message.line if self._gate is None else self._gate.screen(request, message)

    def _list_if_stale(self) -> None:
        if self._gate is not None:
            self._gate.list_if_stale()

    def _write_large(self, request: ClientRequest, large: LargeResult) -> None:
        has_schema = request.tool in self._declares_output
        self._client.write_line(large.finish(request, has_schema=has_schema, is_modern=self.memory.is_modern))

    def _finish(self, request: ClientRequest, message: Message, *, is_long: bool = False) -> None:
        self.requests.remove(request)
        self.requests.remember(request.key)
        if self._gate is not None and request.approval:
            is_failed = message.is_error or (isinstance(message.result, dict) and message.result.get("isError"))
            self._gate.note_end(request, "TOOL_FAILED" if is_failed else None)
        if self._catalogue is not None and request.line and not message.is_long:
            self._catalogue.keep(request.line, message)
        if not message.is_error:
            if self.memory.is_modern and isinstance(message.result, dict) and "resultType" not in message.result:
                self._note_older_server()
            self.memory.note_result(request, message.result)
            self._list_if_stale()  # a call may have come before the greeting was answered
            if request.method == "tools/list":
                self._learn_tools(message.result)
        size = self._server_size if is_long else len(message.line)
        self.guard.report(request, outcome_of(message), answer_bytes=size)

    def _note_older_server(self) -> None:
        if not self._is_server_older:
            text = (
                "shotclock: the client speaks the revision 2026-07-28 only, and the server an older one: expect errors"
            )
            self._note(f"{text}. Let the client negotiate the revision, or update the server")
        self._is_server_older = True

    def _learn_tools(self, result: object) -> None:
        tools = result.get("tools") if isinstance(result, dict) else None
        for tool in tools if isinstance(tools, list) else ():
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str) or len(self._tools) >= MOST_TOOLS:
                continue
            hints = tool.get("annotations")
            self._tools[name] = (
                {hint: hints[hint] for hint in _HINTS if hint in hints} if isinstance(hints, dict) else {}
            )
            if "outputSchema" in tool:
                self._declares_output.add(name)

    def _take_server_notification(self, message: Message) -> None:
        line = message.line
        if message.method == "notifications/progress":
            self.guard.note_progress(message.params.get("progressToken"))
        elif message.method == "notifications/cancelled":
            cancelled = key_of(message.params.get("requestId"))
            found = next((key for key, own in self._asked.items() if key_of(own) == cancelled), None)
            if found is None and self._server.generation > 1:
                return
            self._close_question(found)
            if found is not None and found != cancelled:
                line = notification_line(message.method, {**message.params, "requestId": found[1]})
        elif message.method in LIST_CHANGES:
            if self._gate is not None:
                self._gate.note_list_changed(LIST_CHANGES[message.method])
            if self._changes_ns != NEVER_NS:
                self._changes.add(LIST_CHANGES[message.method])
                return
        self._client.write_line(line)

    def _begin_server_line(self, head: bytes) -> None:
        message = self._server_long = read_long_line(head)
        self._line_ns = self._piece_ns = monotonic_ns()
        self._server_size = len(head)
        self._drops_server_line, self._gathered = False, None
        if message is None:
            self._drops_server_line = True
            self._take_noise(head[:LONGEST_NOISE] + b" (the rest of this line is left out)")
            return
        if self._gate is not None and self._gate.must_see(message):
            self._unscreened = bytearray(head)
            return
        if message.is_answer and message.key is not None:
            request = self.requests.find(message.key)
            self._drops_server_line = request is None or request.state is RequestState.HELD
        elif message.is_answer and not self.requests.has_sent:
            self._drops_server_line = True  # an answer to a request of ours
        elif message.is_request and (new_id := self._open_question(message.id)) is not None:
            head = message.with_id(new_id) or head
        if message.is_answer and any(each.method == "tools/list" for each in self.requests):
            self._gathered = bytearray(head)
        if self._drops_server_line:
            return
        if self._limits.result_bytes and self._has_result_of_call(message):
            self._large = LargeResult(self._limits.result_bytes)
            self._large.add(head)
        else:
            self._client.write_piece(LinePart.START, head)

    def _has_result_of_call(self, message: Message) -> bool:
        """Return whether a long line, which may have its id at the end, must be the result of a call."""
        if not message.is_answer or message.is_error:
            return False
        request = self.requests.find(message.key)
        return all(each.is_call for each in self.requests) if request is None else request.is_call

    def _continue_server_line(self, part: LinePart, piece: bytes) -> None:
        self._piece_ns = monotonic_ns()
        self._server_size += len(piece)
        if self._unscreened is not None:
            self._continue_unscreened(self._unscreened, part, piece)
            return
        if self._gathered is not None:
            self._gathered += piece
            if len(self._gathered) > MOST_GATHERED:
                self._gathered = None
        if part is LinePart.END:
            self._end_server_line(piece)
        elif self._large is not None:
            self._large.add(piece)
        elif not self._drops_server_line:
            self._client.write_piece(part, piece)

    def _continue_unscreened(self, whole: bytearray, part: LinePart, piece: bytes) -> None:
        """Gather a long answer that may be a list. One that is too long to be checked is refused."""
        message = self._server_long
        if message is None:
            return
        most = MOST_GATHERED if message.key is not None else MOST_UNDECIDED
        if len(whole) <= most:
            whole += piece
        if part is not LinePart.END:
            return
        self._server_long = self._unscreened = None
        self._line_ns = self._piece_ns = NEVER_NS
        if len(whole) <= most:
            self.take_from_server(LinePart.WHOLE, bytes(whole))
            return
        id = id_in_tail(piece) if message.key is None else message.id
        self._server.heard(message)
        if isinstance(id, str) and id.startswith(OWN_PREFIX) and self._gate is not None:
            self._gate.fail_list(f"a list is longer than {most} bytes")
        elif (request := self.requests.find(key_of(id))) is not None:
            what = f"was answered with more than {most} bytes, which cannot be checked, while lists are pinned"
            self.guard.fail(request, WrapFailure("RESULT_TOO_LARGE", what, Ending.FINISHED))

    def _end_server_line(self, piece: bytes) -> None:
        message, self._server_long = self._server_long, None
        gathered, self._gathered = self._gathered, None
        large, self._large = self._large, None
        self._line_ns = self._piece_ns = NEVER_NS
        if message is None:
            return
        if message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
            if message.is_request and (new_id := self._open_question(id)) is not None:
                piece = replace_id_in_tail(piece, new_id) or piece
        self._server.heard(message)
        request = self.requests.find(message.key) if message.is_answer else None
        if large is not None:
            large.add(piece)
            if request is not None:
                self._write_large(request, large)
        elif not self._drops_server_line:
            self._client.write_piece(LinePart.END, piece)
        if request is not None and request.state is not RequestState.HELD:
            whole = read_line(bytes(gathered)) if gathered is not None else None
            self._finish(request, whole or message, is_long=True)
        if message.is_answer:
            self.guard.answer_stopping()

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        gate_ns = NEVER_NS if self._gate is None else self._gate.next_due_ns
        return min(self.guard.next_due_ns, self._parked_ns, self._changes_ns, self._line_due_ns, gate_ns)

    @property
    def _line_due_ns(self) -> int:
        if self._piece_ns == NEVER_NS:
            return NEVER_NS
        return min(self._piece_ns + LINE_STALL_MS * NS_PER_MS, self._line_ns + LINE_LIMIT_MS * NS_PER_MS)

    def check_limits(self, now_ns: int, *, is_client_slow: bool) -> None:
        if self._server_long is not None:  # it may be the answer to any request
            self.guard.postpone(now_ns + LINE_LOOK_MS * NS_PER_MS)
        self.guard.check(now_ns)
        if self._gate is not None:
            self._gate.check(now_ns)
        if self._held:
            self._keep_held([each for each in self._held if isinstance(each, Message) or self._is_open(each)])
        if now_ns >= self._parked_ns:
            self._drop_parked()
        if now_ns >= self._changes_ns:
            self._announce_changes()
        if now_ns >= self._line_due_ns:
            self._line_ns = self._piece_ns = now_ns
            if not is_client_slow:
                self._server.kill("stopped in the middle of a line")

    def _is_open(self, request: ClientRequest) -> bool:
        return self.requests.find(request.key) is request

    def _keep_held(self, held: list[Message | ClientRequest]) -> None:
        self._held, self._held_size = held, sum(len(each.line) for each in held)

    # --- processes of the server ---------------------------------------------------------------------------------

    def send_held(self) -> None:
        """Send the messages that waited for the server."""
        held = self._held
        self._keep_held([])
        for each in held:
            if isinstance(each, ClientRequest):
                if self._gate is None or self._gate.take(each):  # another process may have other tools
                    self._send(each)
            else:
                self._server.send(each.line)
        self._list_if_stale()
        if self._parked and self._client_long is not None and self._refuse(self._client_long) is not None:
            self._drop_parked()
        parked, self._parked, self._parked_ns = self._parked, [], NEVER_NS
        if parked:
            self._server.send_piece(*parked[0])
            for part, piece in parked[1:]:
                self._continue_client_line(part, piece)

    def lose_server(self, lost: WrapFailure, unusable: WrapFailure | None) -> None:
        """Answer the requests in flight, or hold those that may be repeated for the next server process.

        `unusable` is the answer to held requests, if there will be no such process soon.
        """
        if self._client_long is not None and not self._parked:
            self._drops_client_line = True
        for _, id in self._asked:
            self._client.write_line(cancellation_line(id, "the server that asked is gone"))
        self._asked.clear()
        self.guard.is_server_asking = False
        self._unscreened = None
        if self._gate is not None:
            self._gate.note_lost_server()
        self._server_long, self._gathered, self._large = None, None, None
        self._line_ns = self._piece_ns = NEVER_NS
        again: list[Message | ClientRequest] = []
        for request in self.requests:
            match request.state:
                case RequestState.CANCELLED:
                    self.requests.remove(request)
                case RequestState.SENT if unusable is None and request.may_be_repeated:
                    request.is_repeated, request.state = request.method != LISTEN, RequestState.HELD
                    request.held_ns = monotonic_ns()
                    again.append(request)
                    self.requests.look_again_at(request)
                case RequestState.SENT | RequestState.STOPPING:
                    self.guard.answer_lost(request, lost)
                case RequestState.HELD if unusable is not None:
                    self.guard.answer_lost(request, lost if request.is_repeated else unusable)
        self._keep_held([*again, *self._held] if unusable is None else [])
        if unusable is not None:
            self._drop_parked()

    def announce_restart(self, kinds: list[str]) -> None:
        """Announce lists that may have changed, together with the announcements of the new server."""
        self._changes = set(kinds)
        self._changes_ns = monotonic_ns() + JOIN_CHANGES_MS * NS_PER_MS

    def _announce_changes(self) -> None:
        self._changes_ns = NEVER_NS
        for method, kind in LIST_CHANGES.items():
            if kind in self._changes:
                self._client.write_line(notification_line(method))

    def _drop_parked(self) -> None:
        """Drop a long request that waits for the server. It is answered when its end, with its id, has come."""
        parked, self._parked, self._parked_ns = self._parked, [], NEVER_NS
        if parked:
            self._drops_client_line = True
        for part, piece in parked[1:]:
            self._continue_client_line(part, piece)
