"""Long lines of the client: they pass in pieces, and are read only at both ends.

A long request is open from its end on: before that, the server could not begin with it.
"""

from __future__ import annotations

from typing import Protocol

from ..core.clocks import NS_PER_MS, ClockKind
from ..core.errors import Ending
from ..core.value_types import replace
from ..process.clock import monotonic_ns
from .failures import WrapFailure
from .guard import RequestGuard
from .lines import LinePart, id_in_tail, replace_id_in_tail
from .links import ServerLink
from .messages import RpcMessage, key_of, read_long_line
from .questions import ServerQuestions
from .replay import OWN_PREFIX
from .requests import NEVER_NS, ClientRequest

STALE_ID = OWN_PREFIX + "stale"


class RequestTaker(Protocol):
    """The session, as the long lines of a client see it."""

    @property
    def is_holding(self) -> bool:
        """Return whether earlier messages wait for the server."""
        ...

    def open_request(self, message: RpcMessage, size: int) -> ClientRequest | None:
        """Open a request; None if it is answered at once."""
        ...

    def refuse_unread(self, id: object) -> None:
        """Refuse a line that a tolerant server might take for a call."""
        ...


class LongRequests:
    """The long line that the client is sending, if any."""

    def __init__(
        self, session: RequestTaker, guard: RequestGuard, questions: ServerQuestions, is_checked: bool, queue_ms: int
    ) -> None:
        """`is_checked`: a policy has to read whole lines, and these are too long for that."""
        self._session = session
        self._guard = guard
        self._questions = questions
        self._is_checked = is_checked
        self._queue_ms = queue_ms
        self._message: RpcMessage | None = None
        self._size = 0
        self._is_dropped = False
        self._parked: list[tuple[LinePart, bytes]] = []
        self.next_due_ns: int = NEVER_NS

    def connect(self, server: ServerLink) -> None:
        self._server = server

    @property
    def is_parked(self) -> bool:
        """Return whether a line waits for the server. No more of it may be read."""
        return bool(self._parked)

    @property
    def is_inside(self) -> bool:
        """Return whether a message has begun and not ended."""
        return self._message is not None

    def take(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._begin(piece)
        elif self._parked:
            self._park(part, piece)
        elif part is LinePart.END:
            self._end(piece)
        else:
            self._size += len(piece)
            if not self._is_dropped:
                self._server.send_piece(part, piece)

    def _begin(self, head: bytes) -> None:
        message = self._message = read_long_line(head)
        self._size = len(head)
        self._is_dropped = self._is_checked
        if self._is_checked:
            return
        if message is not None and message.is_answer and message.key is not None and self._questions.has_fresh_ids:
            server_id = self._questions.close(message.key)
            changed = None if server_id is None else message.with_id(server_id)
            self._is_dropped = changed is None
            head = changed or head
        elif message is None or message.method is None:
            self._is_dropped = not self._server.accepts
        elif self._server.want() is not None:
            self._is_dropped = True
        elif not self._server.accepts or self._session.is_holding:
            self._park(LinePart.START, head)
            return
        if not self._is_dropped:
            self._server.send_piece(LinePart.START, head)

    def _end(self, piece: bytes) -> None:
        message, self._message = self._message, None
        self._size += len(piece)
        if message is not None and message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
            if message.is_answer and self._questions.has_fresh_ids:
                server_id = self._questions.close(message.key)
                piece = replace_id_in_tail(piece, STALE_ID if server_id is None else server_id) or piece
        if not self._is_dropped:
            self._server.send_piece(LinePart.END, piece)
        if self._is_checked:
            self._session.refuse_unread(message.id if message is not None and message.is_request else None)
        elif message is not None and message.is_request:
            self._open(message)
        elif message is not None and message.is_answer:
            self._questions.close(message.key)

    def _open(self, message: RpcMessage) -> None:
        request = self._session.open_request(message, self._size)
        if request is None:
            return
        if self._is_dropped:
            what = "was not sent: the server was not ready when it came"
            self._guard.fail(request, WrapFailure("QUEUE_TIMEOUT", what, Ending.NOT_STARTED, ClockKind.QUEUE))
        else:
            self._guard.note_sent(request)

    # --- lines that wait for the server --------------------------------------------------------------------------

    def _park(self, part: LinePart, piece: bytes) -> None:
        if not self._parked and self._queue_ms:
            self.next_due_ns = monotonic_ns() + self._queue_ms * NS_PER_MS
        self._parked.append((part, piece))

    def _take_parked(self) -> list[tuple[LinePart, bytes]]:
        parked, self._parked, self.next_due_ns = self._parked, [], NEVER_NS
        return parked

    def send_parked(self) -> None:
        parked = self._take_parked()
        if parked:
            self._server.send_piece(*parked[0])
        for part, piece in parked[1:]:
            self.take(part, piece)

    def drop_parked(self) -> None:
        """Drop a line that waits. A request is answered when its end, with its id, has come."""
        parked = self._take_parked()
        self._is_dropped |= bool(parked)
        for part, piece in parked[1:]:
            self.take(part, piece)

    def check(self, now_ns: int) -> None:
        if now_ns >= self.next_due_ns:
            self.drop_parked()

    def note_lost_server(self) -> None:
        """Drop the rest of a line whose begin went to a process that is gone."""
        self._is_dropped |= self._message is not None and not self._parked
