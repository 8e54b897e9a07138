"""The guard of open requests: it answers each at its limit, and finds servers that do not react any more.

A cancellation has no answer by the protocol, so a server that obeys is as silent as a deaf one. A probe that follows
it tells them apart: if nothing is answered within the grace, the server is killed and replaced.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.errors import Ending
from ..core.limits import NS_PER_MS, ClockKind, format_duration
from ..core.value_types import replace
from ..supervise.clock import monotonic_ns
from ._failures import WrapFailure, failure_answer
from ._limits import ServerLimits, name_of_timeout
from ._links import ClientSide, Note, ServerLink
from ._messages import cancellation_line, notification_line
from ._replay import ReplayMemory
from ._requests import NEVER_NS, ClientRequest, EndedRequest, OnEnded, OnOpen, OpenRequest, RequestState, RequestTable

# A call is recorded as open after this time, so that nothing is written for short ones.
OPEN_AFTER_MS = 1_000
# How often open calls are compared with what was recorded, and how often at most.
LOOK_MS = 1_000
SHORTEST_LOOK_MS = 200
# A limit that has moved less, by progress of the server, is not recorded again.
MOVED_MS = 1_000

_CODES = {ClockKind.IDLE: "STALLED", ClockKind.QUEUE: "QUEUE_TIMEOUT"}


class RequestGuard:
    def __init__(
        self,
        limits: ServerLimits,
        client: ClientSide,
        memory: ReplayMemory,
        note: Note,
        server: ServerLink,
        on_ended: OnEnded | None,
        on_open: OnOpen | None,
        on_approved_failed: Callable[[ClientRequest, str, str], None],
    ) -> None:
        self.requests: RequestTable = RequestTable(limits.grace_ms)
        self._is_server_asking = False
        self._limits = limits
        self._client = client
        self._memory = memory
        self._note = note
        self._server = server
        self._on_ended = on_ended
        self._on_open = on_open
        self._on_approved_failed = on_approved_failed
        self._beat_ns = NEVER_NS
        self._check_ns = NEVER_NS
        self._last_number = 0

    def watch(self, request: ClientRequest) -> None:
        self.requests.add(request)
        if self._limits.heartbeat_ms and request.token is not None:
            self._beat_ns = min(self._beat_ns, request.arrived_ns + self._limits.heartbeat_ms * NS_PER_MS)
        if self._on_open is not None and request.is_call:
            self._check_ns = min(self._check_ns, request.arrived_ns + OPEN_AFTER_MS * NS_PER_MS)

    def record_sent(self, request: ClientRequest) -> None:
        request.state, request.is_unsent = RequestState.SENT, False
        request.sent_ns = request.sign_ns = monotonic_ns()
        self.requests.reschedule(request)

    def record_progress(self, token: object) -> None:
        request = self.requests.with_token(token)
        if request is not None:
            request.sign_ns, request.beats = monotonic_ns(), -1

    def set_server_asking(self, is_asking: bool) -> None:
        """Note whether the server waits for an answer of the client: a person may give it, so nothing is idle."""
        self._is_server_asking = is_asking
        now_ns = monotonic_ns()
        for request in self.requests.in_state(RequestState.SENT):
            request.sign_ns = now_ns

    def cancel(self, request: ClientRequest) -> bool:
        """Note that the client has cancelled a request. Return whether the server need not know."""
        if request.state is RequestState.HELD:
            self.requests.remove(request)
            self.report(request, "CANCELLED")
            return True
        if request.state is not RequestState.CANCELLED:
            self.report(request, "CANCELLED")
        was_cancelled = request.state is RequestState.STOPPING
        request.state, request.changed_ns = RequestState.CANCELLED, monotonic_ns()
        self.requests.reschedule(request)
        return was_cancelled

    @property
    def next_due_ns(self) -> int:
        return min(self.requests.next_due_ns, self._beat_ns, self._check_ns)

    def check(self, now_ns: int) -> None:
        if now_ns >= self.requests.next_due_ns:
            for request, kind in self.requests.list_due(now_ns):
                self._reach_limit(request, kind, now_ns)
                if self.requests.get(request.key) is request:
                    self.requests.reschedule(request)
        if now_ns >= self._beat_ns:
            self._send_heartbeats(now_ns)
        if now_ns >= self._check_ns:
            self._record_open(now_ns)

    def _record_open(self, now_ns: int) -> None:
        """Report the calls that have been open for a while, and those that have changed since they were reported."""
        changed: list[OpenRequest] = []
        self._check_ns = NEVER_NS
        for request in self.requests:
            if not request.is_call or request.state is RequestState.CANCELLED:
                continue
            recorded_ns = request.arrived_ns + OPEN_AFTER_MS * NS_PER_MS
            if now_ns >= recorded_ns:
                recorded_ns = now_ns + LOOK_MS * NS_PER_MS
                now = self._describe_open(request)
                if request.recorded is None or not _is_same(request.recorded, now):
                    request.recorded = now
                    changed.append(now)
            self._check_ns = min(self._check_ns, recorded_ns)
        if self._check_ns < NEVER_NS:
            self._check_ns = max(self._check_ns, now_ns + SHORTEST_LOOK_MS * NS_PER_MS)
        if changed and self._on_open is not None:
            self._on_open(changed)

    def _describe_open(self, request: ClientRequest) -> OpenRequest:
        if not request.number:
            self._last_number += 1
            request.number = self._last_number
        due_ns, kind = request.due(self._limits.grace_ms)
        return OpenRequest(
            request.number,
            request.tool,
            request.arrived_ns,
            request.state is not RequestState.HELD,
            request.limits,
            due_ns if due_ns < NEVER_NS else None,
            request.fired if request.state is RequestState.STOPPING else kind if due_ns < NEVER_NS else None,
            request.size,
            request.digest,
            self._server.generation,
        )

    def _reach_limit(self, request: ClientRequest, kind: ClockKind | None, now_ns: int) -> None:
        match request.state:
            case RequestState.CANCELLED:
                self.requests.remove(request)
                self.requests.remember(request.key)
            case RequestState.HELD:
                self.fail(request, self._too_late(request, kind or ClockKind.QUEUE))
            case RequestState.SENT if kind is ClockKind.IDLE and self._is_server_asking:
                request.sign_ns = now_ns
            case RequestState.SENT:
                self._begin_stopping(request, kind or ClockKind.TIMEOUT, now_ns)
            case RequestState.STOPPING if (older := self._older_call(request)) is not None:
                failure = self._too_late(request, request.fired or ClockKind.TIMEOUT)
                failure.what += f"; it answers nothing, as it may be busy with {older.tool}, which is within its limits"
                self.fail(request, failure)
            case RequestState.STOPPING:
                request.changed_ns = now_ns
                self._server.kill(f"did not react within {format_duration(self._limits.grace_ms)} after a limit")

    def _older_call(self, request: ClientRequest) -> ClientRequest | None:
        """Return a call within its limits that the server got earlier: a busy server is not killed."""
        earlier = (each for each in self.requests.in_state(RequestState.SENT) if each.sent_ns < request.sent_ns)
        return next((each for each in earlier if each.is_call), None)

    def _begin_stopping(self, request: ClientRequest, kind: ClockKind, now_ns: int) -> None:
        request.fired = kind
        if request.method == "initialize":  # by the protocol it cannot be cancelled
            request.state, request.changed_ns = RequestState.STOPPING, now_ns
            self._server.kill("did not answer initialize")
            return
        if self._server.accepts:
            self._server.send(cancellation_line(request.id, _reason(request, kind)))
            if not self._server.probe():
                self.fail(request, self._too_late(request, kind))
                return
        # Otherwise the server is about to end, and the request is answered with that.
        request.state, request.changed_ns = RequestState.STOPPING, now_ns

    def answer_stopping(self) -> None:
        """Answer the requests that reached a limit: the server has answered something since, so it is not deaf."""
        for request in self.requests.in_state(RequestState.STOPPING):
            self.fail(request, self._too_late(request, request.fired or ClockKind.TIMEOUT))

    def answer_lost(self, request: ClientRequest, lost: WrapFailure) -> None:
        """Answer a request whose server is gone."""
        failure = replace(lost)
        if request.state is RequestState.STOPPING:
            failure.clock = request.fired or ClockKind.TIMEOUT
            failure.code = _CODES.get(failure.clock, "TIMEOUT")
            failure.what = f"{_reason(request, failure.clock)}, and {lost.what}"
        self.fail(request, failure)

    def _too_late(self, request: ClientRequest, kind: ClockKind) -> WrapFailure:
        what, ending = _reason(request, kind), Ending.ABANDONED
        if request.state is not RequestState.HELD:
            what += "; the server was asked to cancel it, and may still be working on it"
        elif not request.is_repeated or request.is_unsent:
            what, ending = f"was not sent: {what}", Ending.NOT_STARTED
        else:
            what = f"was lost with its server, and {what} when it was to be repeated"
        return WrapFailure(_CODES.get(kind, "TIMEOUT"), what, ending, kind)

    def fail(self, request: ClientRequest, failure: WrapFailure) -> None:
        """Answer a request in place of the server."""
        if not failure.advice:
            failure.stderr, failure.noise_lines = self._server.describe_output()
        self.requests.remove(request)
        self.requests.remember(request.key)
        envelope, line = failure_answer(request, failure, is_modern=self._memory.is_modern)
        call_id = str(envelope.meta["request_id"])
        self._note(f"shotclock: {call_id}: {failure.code}: {request.tool or request.method} {failure.what}")
        self._client.write_line(line)
        self.report(request, failure.code, call_id)
        if request.approval:
            self._on_approved_failed(request, failure.code, failure.what)

    @property
    def is_recorded(self) -> bool:
        return self._on_ended is not None

    def report(self, request: ClientRequest, outcome: str, call_id: str = "", answer_bytes: int = 0) -> None:
        """Report the end of a request, once: a cancelled one may be answered later."""
        if self._on_ended is None or request.state is RequestState.CANCELLED:
            return
        self._on_ended(
            EndedRequest(
                call_id,
                request.method,
                request.tool,
                outcome,
                request.limits,
                (monotonic_ns() - request.arrived_ns) // NS_PER_MS,
                request.size,
                answer_bytes,
                request.digest,
                self._server.generation,
                request.number,
                request.id,
                request.trace,
            )
        )

    def _send_heartbeats(self, now_ns: int) -> None:
        every_ns = self._limits.heartbeat_ms * NS_PER_MS
        waiting = [each for each in self.requests if each.token is not None and each.beats >= 0]
        self._beat_ns = now_ns + every_ns if waiting else NEVER_NS
        for request in waiting:
            if request.token is None or request.state is RequestState.CANCELLED:
                continue
            if now_ns < request.arrived_ns + every_ns:
                continue
            request.beats += 1
            took = format_duration((now_ns - request.arrived_ns) // NS_PER_MS)
            # Progress has to grow, and the server's own may begin anywhere above 0.
            beat = {"progressToken": request.token[1], "progress": request.beats / 1_000_000}
            beat["message"] = f"running for {took}"
            self._client.write_line(notification_line("notifications/progress", beat))


def _is_same(before: OpenRequest, now: OpenRequest) -> bool:
    """Return whether a call is still as it was recorded, but for small movements of its next limit."""
    if before.due_ns is None or now.due_ns is None:
        return before == now
    return replace(before, due_ns=now.due_ns) == now and abs(now.due_ns - before.due_ns) < MOVED_MS * NS_PER_MS


def _reason(request: ClientRequest, kind: ClockKind) -> str:
    limit = format_duration(getattr(request.limits, f"{kind}_ms"))
    match kind:
        case ClockKind.IDLE:
            return f"made no progress for {limit}, its idle limit"
        case ClockKind.QUEUE:
            return f"the server was not ready within {limit}"
    return f"did not end within {limit}, {name_of_timeout(request.method)}"
