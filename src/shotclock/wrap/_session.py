"""One client connection: the way of each whole message, over all processes of the server.

Messages pass as bytes, and the ids of the client are never changed. AGENTS.md: bytes pass unchanged.
"""

from __future__ import annotations

from ..core.errors import Ending
from ..core.limits import NS_PER_MS
from ..core.value_types import replace
from ..supervise.clock import monotonic_ns
from ._catalogue import LastCatalogue
from ._failures import WrapFailure
from ._gate import Gate, Policy
from ._guard import RequestGuard
from ._known_tools import KnownTools
from ._large_results import cut_result
from ._limits import ServerLimits
from ._lines import LONGEST_LINE, LongLine
from ._links import ClientSide, Note, ServerLink
from ._messages import (
    LIST_CHANGES,
    LISTEN,
    RpcMessage,
    encode,
    error_line,
    key_of,
    notification_line,
    read_line,
    read_long_line,
    read_strictly,
)
from ._questions import ServerQuestions
from ._replay import ReplayMemory
from ._requests import (
    NEVER_NS,
    ClientRequest,
    OnEnded,
    OnOpen,
    RequestState,
    RequestTable,
    digest_of_arguments,
    new_request,
    outcome_of,
)
from ._revisions import RevisionCheck

# Bytes that wait for a server.
MOST_HELD = 2 * 1024 * 1024
# After a restart the server may announce the same change several times.
JOIN_CHANGES_MS = 300
# A tolerant server might take such a line for a call.
_UNREADABLE = "a line that is no valid message, or ambiguous in its keys, was not passed on"


class ClientSession:
    def __init__(
        self,
        limits: ServerLimits,
        client: ClientSide,
        note: Note,
        server: ServerLink,
        *,
        policy: Policy | None = None,
        on_ended: OnEnded | None = None,
        on_open: OnOpen | None = None,
        catalogue: LastCatalogue | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self.memory: ReplayMemory = ReplayMemory()
        self.guard: RequestGuard = RequestGuard(
            limits, client, self.memory, note, server, on_ended, on_open, self._policy.record_end
        )
        self.requests: RequestTable = self.guard.requests
        self.noise_lines: int = 0
        self.gate: Gate = Gate(
            self._policy,
            self.guard,
            client,
            self.memory,
            server,
            note,
            list_ms=limits.list_ms,
            forward=self._forward,
        )
        self._questions = ServerQuestions(client, self.guard, self.memory, server)
        self._revisions = RevisionCheck(self.guard, self.memory, server, self._pass_answer)
        self._limits = limits
        self._client = client
        self._note = note
        self._server = server
        self._read = read_strictly if self._policy.decides else read_line
        self._catalogue = catalogue
        self._held: list[RpcMessage | ClientRequest] = []
        self._held_size = 0
        self._tools = KnownTools()
        self._changes: set[str] = set()
        self._changes_ns = NEVER_NS

    @property
    def is_client_paused(self) -> bool:
        """Return whether nothing more of the client may be read until the server is ready."""
        return self._held_size > MOST_HELD

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def is_quiet(self) -> bool:
        """Return whether neither side waits for the other."""
        return not self.requests.has_waiting and not self._questions

    # --- from the client -----------------------------------------------------------------------------------------

    def handle_client_line(self, line: bytes | LongLine) -> None:
        if isinstance(line, LongLine):
            self._refuse_long_line(line)
        elif (message := self._read(line)) is None:
            self._pass_unread(line)
        elif message.is_request:
            self._handle_request(message)
        elif message.is_answer:
            self._questions.handle_answer(message)
        else:
            self._handle_client_notification(message)

    def _pass_unread(self, line: bytes) -> None:
        """Pass a line that is no message, so that the server refuses it as it would without us."""
        if line.lstrip()[:1] == b"[":
            self._refuse_line(None, "batches of messages are not passed on; send each message as a line of its own")
        elif line.strip() and self._policy.decides:
            message = read_line(line)
            self._refuse_line(message.id if message is not None and message.is_request else None, _UNREADABLE)
        elif line.strip() and self._server.accepts:
            self._server.send(line)

    def _refuse_long_line(self, line: LongLine) -> None:
        message = read_long_line(line)
        why = f"a line of {line.size} bytes was not passed on: the most is {LONGEST_LINE}"
        if message.is_answer and (server_id := self._questions.close(message.key)) is not None:
            self._server.send(error_line(server_id, why))
        self._refuse_line(message.id if message.is_request else None, why)

    def _refuse_line(self, id: object, why: str) -> None:
        self._client.write_line(error_line(id, why))

    def _handle_request(self, message: RpcMessage) -> None:
        if self.requests.get(message.key) is not None or self.memory.is_own(message.id):
            self._refuse_line(None, "a request with the id of an open request was not passed on")
            return
        if self._answer_from_catalogue(message):
            return
        request = self._open_request(message)
        if request is not None and self.gate.take(request, message):
            self._forward(request)

    def _forward(self, request: ClientRequest) -> None:
        if self._server.accepts and not self._held:
            self._send(request)
        else:
            self._hold(request)

    def _answer_from_catalogue(self, message: RpcMessage) -> bool:
        """Answer a request as the server did the last time, as long as it has not spoken this time."""
        if self._catalogue is None or self._server.has_spoken or self._server.generation > 1:
            return False
        known = self._catalogue.get(message)
        if known is None or self._server.want() is not None:
            return False
        answer = read_line(encode({"jsonrpc": "2.0", "id": message.id, **known}))
        if answer is None:
            return False
        self.memory.record_client_message(message)
        self._client.write_line(self.gate.screen(new_request(message, monotonic_ns()), answer))
        result = known.get("result")
        if message.method == "initialize":
            self.memory.record_result(new_request(message, monotonic_ns()), result)
            self._server.greet()
        elif message.method == "tools/list":
            self._tools.learn(result)
        return True

    def keep_greeting(self, answer: RpcMessage) -> None:
        if self._catalogue is not None:
            self._catalogue.keep(self.memory.initialize_line, answer)

    def _open_request(self, message: RpcMessage) -> ClientRequest | None:
        """Open a request; None if it is answered at once."""
        self.memory.record_client_message(message)
        request = new_request(message, monotonic_ns())
        request.limits = self._limits.of(request.method, request.tool)
        if self._catalogue is not None and not self._server.has_spoken:  # its first start may take long
            request.limits = replace(request.limits, queue_ms=self._limits.start_up_ms)
        if request.is_call:
            request.effects = self._tools.get(request.tool).effects
            request.digest = digest_of_arguments(message) if self.guard.is_recorded else None
        self.guard.watch(request)
        unusable = self._revisions.refuse(message) or self._server.want()
        if unusable is not None:
            self.guard.fail(request, unusable)
        return request if self._is_open(request) else None  # the start may have failed already

    def _hold(self, waiting: RpcMessage | ClientRequest) -> None:
        self._held.append(waiting)
        self._held_size += len(waiting.line)

    def _send(self, request: ClientRequest) -> None:
        if not self._server.accepts or not self._server.send(request.line):
            self._hold(request)
            return
        self.guard.record_sent(request)
        if not request.may_be_repeated:
            request.line = b""  # it is not needed again, and hundreds of open calls would keep theirs

    def _handle_client_notification(self, message: RpcMessage) -> None:
        if self.gate.guards(message.method):
            self._refuse_line(None, _UNREADABLE)  # a call without an id
            return
        self.memory.record_client_message(message)
        if message.method == "notifications/cancelled":
            request = self.requests.get(key_of(message.params.get("requestId")))
            if request is None and not self._server.accepts:
                return
            if request is not None and self.guard.cancel(request):
                self._keep_held([each for each in self._held if each is not request])
                return
        if self._server.accepts and not self._held:
            self._server.send(message.line)
            self.gate.lists.read_if_stale()
        elif message.method == "notifications/initialized" and self.memory.greeting is not None:
            pass  # it follows the greeting that is being replayed
        elif self._server.want() is None:
            self._hold(message)

    # --- from the server -----------------------------------------------------------------------------------------

    def handle_server_line(self, line: bytes | LongLine) -> None:
        if isinstance(line, LongLine):
            self._drop_long_line(line)
        elif (message := read_line(line)) is not None:
            if self.gate.checks_answers and read_strictly(line) is None:  # the client may read it differently
                what = "was answered with a message that is ambiguous in its keys, which cannot be checked"
                if not self._fail_answer(message, "RESULT_INVALID", what):
                    self._handle_noise(line)
            else:
                self._handle_server_message(message)
        elif line.strip():
            self._handle_noise(line)

    def _drop_long_line(self, line: LongLine) -> None:
        """Answer the request that a line was about which is too long to be passed."""
        message = read_long_line(line)
        what = f"was answered with {line.size} bytes; the most that is passed on is {LONGEST_LINE}"
        if not self._fail_answer(message, "RESULT_TOO_LARGE", what):
            self._note(f"shotclock: dropped a line of the server of {line.size} bytes: the most is {LONGEST_LINE}")
            if message.is_request:
                self._server.send(error_line(message.id, "the request is too long to be passed on"))
        if message.is_answer:
            self.guard.answer_stopping()

    def _fail_answer(self, message: RpcMessage, code: str, what: str) -> bool:
        """Fail the request that is answered with a message which is not passed on. Return whether there is one."""
        self._server.record_sign_of_life(message)
        request = self.requests.get(message.key) if message.is_answer else None
        if request is not None and request.state is not RequestState.HELD:
            self.guard.fail(request, WrapFailure(code, what, Ending.FINISHED))
        elif self.memory.is_own(message.id) and self._policy.decides:
            self.gate.lists.fail(message.id, f"it {what}")
        else:
            return False
        return True

    def _handle_noise(self, line: bytes) -> None:
        self.noise_lines += 1
        self._note(line.decode("utf-8", "replace").rstrip("\r\n"))

    def _handle_server_message(self, message: RpcMessage) -> None:
        self._server.record_sign_of_life(message)
        if message.is_answer:
            self._handle_server_answer(message)
        elif message.is_request:
            new_id = self._questions.open(message.id)
            self._client.write_line(message.line if new_id is None else message.with_id(new_id))
        else:
            self._handle_server_notification(message)

    def _handle_server_answer(self, message: RpcMessage) -> None:
        request = self.requests.get(message.key)
        if message.id is None and message.is_error:  # about a line that could not be read
            self._client.write_line(message.line)
        elif self.memory.is_own(message.id):
            self._revisions.handle_own_answer(message)
            self.gate.lists.handle_answer(message)
        elif request is None or request.state is RequestState.HELD:
            if message.key is None or not self.requests.was_answered(message.key):
                self._note(f"shotclock: dropped an answer of the server with the unknown id {message.id!r}")
        elif self._revisions.take(request, message):
            pass
        elif request.is_call and isinstance(message.result, dict) and 0 < self._limits.result_bytes < len(message.line):
            # Clients refuse a success without the structured content that the tool declares.
            has_schema = self._tools.get(request.tool).has_output_schema
            is_error = message.is_tool_error or (
                "structuredContent" in message.result if has_schema is None else has_schema
            )
            limit, is_modern = self._limits.result_bytes, self.memory.is_modern
            self._client.write_line(cut_result(request, message, limit, is_error=is_error, is_modern=is_modern))
            self._finish(request, message)
        elif request.state is not RequestState.STOPPING or not message.is_error:
            self._pass_answer(request, message)
        self.guard.answer_stopping()

    def _pass_answer(self, request: ClientRequest, message: RpcMessage) -> None:
        self._client.write_line(self.gate.screen(request, message))  # first: the client can work while we note the end
        self._finish(request, message)

    def _finish(self, request: ClientRequest, message: RpcMessage) -> None:
        self.requests.remove(request)
        self.requests.remember(request.key)
        self._policy.record_end(request, "TOOL_FAILED" if message.is_error or message.is_tool_error else None)
        if self._catalogue is not None and request.line:
            self._catalogue.keep(request.line, message)
        if not message.is_error:
            self.memory.record_result(request, message.result)
            self.gate.lists.read_if_stale()  # a call may have come before the greeting was answered
            if request.method == "tools/list":
                self._tools.learn(message.result)
        self.guard.report(request, outcome_of(message), answer_bytes=len(message.line))

    def _handle_server_notification(self, message: RpcMessage) -> None:
        if message.method == "notifications/cancelled":
            self._questions.handle_cancellation(message)
            return
        if message.method == "notifications/progress":
            self.guard.record_progress(message.params.get("progressToken"))
        elif message.method in LIST_CHANGES:
            self.gate.handle_list_change(LIST_CHANGES[message.method])
            if self._changes_ns != NEVER_NS:
                self._changes.add(LIST_CHANGES[message.method])
                return
        self._client.write_line(message.line)

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        lists_ns = self.gate.lists.next_due_ns
        return min(self.guard.next_due_ns, self._revisions.next_due_ns, self._changes_ns, lists_ns)

    def check_limits(self, now_ns: int) -> None:
        self.guard.check(now_ns)
        self._revisions.check(now_ns)
        self.gate.lists.check(now_ns)
        if self._held:
            self._keep_held([each for each in self._held if isinstance(each, RpcMessage) or self._is_open(each)])
        if now_ns >= self._changes_ns:
            self._changes_ns = NEVER_NS
            for method, kind in LIST_CHANGES.items():
                if kind in self._changes:
                    self._client.write_line(notification_line(method))

    def _is_open(self, request: ClientRequest) -> bool:
        return self.requests.get(request.key) is request

    def _keep_held(self, held: list[RpcMessage | ClientRequest]) -> None:
        self._held, self._held_size = held, sum(len(each.line) for each in held)

    # --- processes of the server ---------------------------------------------------------------------------------

    def send_held(self) -> None:
        held = self._held
        self._keep_held([])
        for each in held:
            if isinstance(each, ClientRequest):
                if self.gate.take(each):  # another process may have other tools
                    self._send(each)
            else:
                self._server.send(each.line)
        self.gate.lists.read_if_stale()

    def lose_server(self, lost: WrapFailure, unusable: WrapFailure | None) -> None:
        """Answer the requests in flight, or hold those that may be repeated for the next server process.

        `unusable` is the answer to held requests, if there will be no such process soon.
        """
        self._questions.cancel_all()
        self._revisions.handle_lost_server()
        self.gate.lists.handle_lost_server()
        again: list[RpcMessage | ClientRequest] = []
        for request in self.requests:
            match request.state:
                case RequestState.CANCELLED:
                    self.requests.remove(request)
                case RequestState.SENT if unusable is None and request.may_be_repeated:
                    request.is_repeated, request.state = request.method != LISTEN, RequestState.HELD
                    request.held_ns = monotonic_ns()
                    again.append(request)
                    self.requests.reschedule(request)
                case RequestState.SENT | RequestState.STOPPING:
                    self.guard.answer_lost(request, lost)
                case RequestState.HELD if unusable is not None:
                    self.guard.answer_lost(request, lost if request.is_repeated else unusable)
        self._keep_held([*again, *self._held] if unusable is None else [])

    def announce_restart(self, kinds: list[str]) -> None:
        """Announce lists that may have changed, together with the announcements of the new server."""
        self._changes = set(kinds)
        self._changes_ns = monotonic_ns() + JOIN_CHANGES_MS * NS_PER_MS
