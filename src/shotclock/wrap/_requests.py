"""Open requests of a client, each with its next deadline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum, auto

from ..calls.call import Effects
from ..core.limits import NS_PER_MS, ClockKind
from ..core.proposal import digest
from ..core.trace import TraceContext
from ..core.value_types import record, value
from ._limits import CallLimits
from ._messages import HARMLESS, LONGEST_REPEATED, Key, RpcMessage, key_of

# The answer to a request that the client cancelled, or that we answered, may come this late without being strange.
REMEMBERED_MS = 60_000
MOST_REMEMBERED = 1_000
NEVER_NS = 1 << 62


class RequestState(Enum):
    HELD = auto()  # the server is not ready, so nothing has been sent
    SENT = auto()
    STOPPING = auto()  # a limit was reached and the server was asked to cancel it
    CANCELLED = auto()  # by the client, which expects no answer


@record
class ClientRequest:
    """A request of the client that has not been answered."""

    id: object
    key: Key
    method: str
    tool: str
    line: bytes  # empty once it is sent, unless it may be repeated
    arrived_ns: int
    size: int = 0  # of its line, in bytes
    digest: str | None = None  # of the arguments of a call, if calls are recorded
    limits: CallLimits = CallLimits()
    effects: Effects = Effects(mutates=False)  # of every request but a call
    token: Key | None = None
    state: RequestState = RequestState.HELD
    held_ns: int = 0  # since when it waits for the server
    sent_ns: int = 0
    sign_ns: int = 0  # the last progress
    changed_ns: int = 0  # when it was stopped or cancelled
    fired: ClockKind | None = None
    is_repeated: bool = False
    is_unsent: bool = False  # the server over HTTP has refused it, as its session was lost
    approval: str = ""  # the id of the proposal by which a person has approved this call
    definition: str = ""  # the digest of the tool that was approved
    beats: int = 0  # heartbeats sent; -1 after the server's own progress
    trace: TraceContext | None = None  # of the client, from `_meta`
    number: int = 0  # in the log, once it has recorded the call as open
    recorded: OpenRequest | None = None  # as the log has it

    @property
    def is_call(self) -> bool:
        return self.method == "tools/call"

    @property
    def may_be_repeated(self) -> bool:
        """Return whether another server process may be asked again after this one died."""
        if not 0 < len(self.line) <= LONGEST_REPEATED or self.is_repeated or self.approval:
            return False
        if self.is_call and not self.is_unsent:
            return not self.effects.mutates or self.effects.idempotent
        return self.is_unsent or self.method in HARMLESS

    def due(self, grace_ms: int) -> tuple[int, ClockKind | None]:
        """Return when to look at it next, and the limit that is reached then."""
        limits = self.limits
        match self.state:
            case RequestState.STOPPING:
                return self.changed_ns + grace_ms * NS_PER_MS, None
            case RequestState.CANCELLED:
                return self.changed_ns + REMEMBERED_MS * NS_PER_MS, None
        timeout = (_after(self.arrived_ns, limits.timeout_ms), ClockKind.TIMEOUT)
        if self.state is RequestState.HELD:
            return min(timeout, (_after(self.held_ns, limits.queue_ms), ClockKind.QUEUE))
        return min(timeout, (_after(self.sign_ns, limits.idle_ms), ClockKind.IDLE))


def _after(start_ns: int, limit_ms: int) -> int:
    return start_ns + limit_ms * NS_PER_MS if limit_ms else NEVER_NS


class RequestTable:
    """The open requests of the client, by id and by progress token."""

    def __init__(self, grace_ms: int) -> None:
        self.next_due_ns: int = NEVER_NS
        self._grace_ms = grace_ms
        self._open: dict[Key, ClientRequest] = {}
        self._by_token: dict[Key, ClientRequest] = {}
        self._answered: OrderedDict[Key, None] = OrderedDict()

    def __iter__(self) -> Iterator[ClientRequest]:
        return iter(list(self._open.values()))

    def get(self, key: Key | None) -> ClientRequest | None:
        return None if key is None else self._open.get(key)

    def with_token(self, token: object) -> ClientRequest | None:
        key = key_of(token)
        return None if key is None else self._by_token.get(key)

    def in_state(self, *states: RequestState) -> list[ClientRequest]:
        return [request for request in self._open.values() if request.state in states]

    @property
    def has_waiting(self) -> bool:
        return any(request.state is not RequestState.CANCELLED for request in self._open.values())

    def add(self, request: ClientRequest) -> None:
        self._open[request.key] = request
        if request.token is not None:
            self._by_token[request.token] = request
        self.reschedule(request)

    def reschedule(self, request: ClientRequest) -> None:
        """Take the changed limits of a request into account."""
        self.next_due_ns = min(self.next_due_ns, request.due(self._grace_ms)[0])

    def remove(self, request: ClientRequest) -> None:
        self._open.pop(request.key, None)
        if request.token is not None:
            self._by_token.pop(request.token, None)

    def remember(self, key: Key) -> None:
        """Remember an id that we answered in place of the server, whose own answer may follow."""
        self._answered[key] = None
        if len(self._answered) > MOST_REMEMBERED:
            self._answered.popitem(last=False)

    def was_answered(self, key: Key) -> bool:
        return key in self._answered

    def list_due(self, now_ns: int) -> list[tuple[ClientRequest, ClockKind | None]]:
        """Return the requests whose moment has come, with the limit that each has reached."""
        due = []
        self.next_due_ns = NEVER_NS
        for request in self._open.values():
            at_ns, kind = request.due(self._grace_ms)
            if at_ns <= now_ns:
                due.append((request, kind))
            else:
                self.next_due_ns = min(self.next_due_ns, at_ns)
        return due


@value
class EndedRequest:
    """A request that was answered or cancelled, for the log of calls."""

    id: str  # ours, named in failures; empty after a success
    method: str
    tool: str
    outcome: str  # of an answer of the server, see `outcome_of`; otherwise the code of our failure
    limits: CallLimits
    elapsed_ms: int
    request_bytes: int
    answer_bytes: int  # 0 without an answer of the server
    digest: str | None  # of the arguments; None where they were too long to be read
    generation: int  # of the server process: 1 until it is started again
    number: int = 0  # of the open request, if it was recorded
    request_id: object = None  # of the client
    trace: TraceContext | None = None  # of the client


@value
class OpenRequest:
    """A request that has been open for a while, for the log of calls. Times are those of the monotonic clock."""

    number: int
    tool: str
    arrived_ns: int
    is_sent: bool
    limits: CallLimits
    due_ns: int | None  # when its next limit is reached
    due_by: ClockKind | None
    request_bytes: int
    digest: str | None
    generation: int


OnEnded = Callable[[EndedRequest], None]
OnOpen = Callable[[list[OpenRequest]], None]


def outcome_of(answer: RpcMessage) -> str:
    if answer.is_error:
        return "error"
    return "tool_error" if answer.is_tool_error else "ok"


def digest_of_arguments(call: RpcMessage) -> str | None:
    """Return the SHA-256 of the arguments as canonical JSON; None if there is none."""
    try:
        return digest(call.params.get("arguments", {}))
    except (ValueError, TypeError):  # NaN, or nested too deep
        return None


def new_request(message: RpcMessage, now_ns: int) -> ClientRequest:
    if message.key is None or message.method is None:
        raise ValueError("the message is no request")
    name = message.params.get("name")
    return ClientRequest(
        id=message.id,
        key=message.key,
        method=message.method,
        tool=name if message.method == "tools/call" and isinstance(name, str) else "",
        line=message.line,
        arrived_ns=now_ns,
        size=len(message.line),
        token=key_of(message.meta.get("progressToken")),
        held_ns=now_ns,
        sign_ns=now_ns,
        trace=TraceContext.carried_by(message.meta),
    )
