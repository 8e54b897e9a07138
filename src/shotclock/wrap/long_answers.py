"""Long lines of the server: they pass in pieces, and are read only at both ends.

Two kinds are kept until their end: results that are to be cut, and answers that may be a list to be checked, because
many servers write the id at the end.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from ..core.clocks import NS_PER_MS
from ..core.errors import Ending
from ..core.value_types import record, replace
from ..process.clock import monotonic_ns
from .failures import WrapFailure
from .gate import Gate
from .guard import RequestGuard
from .large_results import LargeResult
from .lines import LinePart, Outline, error_flag_in_tail, id_in_tail, replace_id_in_tail
from .links import ClientLink, ServerLink
from .messages import RpcMessage, key_of, read_line, read_long_line, read_strictly
from .questions import ServerQuestions
from .replay import ReplayMemory
from .requests import NEVER_NS, ClientRequest, RequestState

# Of a list that is too long to be parsed as it passes.
MOST_GATHERED = 1024 * 1024
# Of an answer that has its id at the end, as long as it may be a list that is to be checked.
MOST_UNDECIDED = 64 * 1024 * 1024
# A server that stops in the middle of a line, or never ends it, blocks all other messages.
LINE_STALL_MS = 10_000
LINE_LIMIT_MS = 60_000
LINE_LOOK_MS = 100
LONGEST_NOISE = 2_000  # of a long line that is no message


class AnswerTaker(Protocol):
    """The session, as the long lines of a server see it."""

    def take_noise(self, line: bytes) -> None: ...

    def refuse_answer(self, message: RpcMessage, line: bytes) -> None:
        """Refuse a message that the client may read differently."""
        ...

    def take_from_server(self, part: LinePart, piece: bytes) -> None: ...

    def write_large(self, request: ClientRequest, message: RpcMessage, large: LargeResult) -> None:
        """Write a result for the client that may have to be cut."""
        ...

    def finish(self, request: ClientRequest, message: RpcMessage, size: int) -> None:
        """Note that a request is answered."""
        ...


class LineWay(Enum):
    """The way of a long line."""

    PASS = auto()  # to the client, piece by piece
    DROP = auto()
    CHECK = auto()  # gathered: it may be a list that is to be checked
    CUT = auto()  # spooled: a result that may have to be cut


@record
class LongLine:
    """A line that the server is sending. `message` is None if it is no message."""

    message: RpcMessage | None
    way: LineWay
    begun_ns: int
    piece_ns: int
    size: int
    gathered: bytearray | None = None
    large: LargeResult | None = None
    outline: Outline | None = None  # where the client must not read it differently


class LongAnswers:
    """The long line that the server is sending, if any."""

    def __init__(
        self,
        session: AnswerTaker,
        client: ClientLink,
        guard: RequestGuard,
        memory: ReplayMemory,
        questions: ServerQuestions,
        gate: Gate | None,
        result_bytes: int,
    ) -> None:
        self._session = session
        self._client = client
        self._guard = guard
        self._requests = guard.requests
        self._memory = memory
        self._questions = questions
        self._gate = gate
        self._result_bytes = result_bytes
        self._line: LongLine | None = None

    def connect(self, server: ServerLink) -> None:
        self._server = server

    def take(self, part: LinePart, piece: bytes) -> None:
        if part is LinePart.START:
            self._begin(piece)
        elif self._line is not None:
            self._continue(self._line, part, piece)

    def forget(self) -> None:
        """Forget the line of a server that is gone."""
        self._line = None

    def _begin(self, head: bytes) -> None:
        message, now_ns = read_long_line(head), monotonic_ns()
        line = self._line = LongLine(message, LineWay.PASS, now_ns, now_ns, len(head))
        if self._gate is not None and self._gate.checks_answers:
            line.outline = Outline()
            line.outline.add(head)
        if message is None or not (message.is_answer or message.method):
            line.message, line.way = None, LineWay.DROP
            self._session.take_noise(head[:LONGEST_NOISE] + b" (the rest of this line is left out)")
            return
        line.way = self._choose_way(message)
        is_open = message.is_request and line.way is LineWay.PASS
        if is_open and (new_id := self._questions.open(message.id)) is not None:
            head = message.with_id(new_id) or head
        if line.way is LineWay.CHECK or (line.way is LineWay.PASS and self._may_list_tools(message)):
            line.gathered = bytearray(head)
        if line.way is LineWay.CUT:
            line.large = LargeResult(self._result_bytes)
            line.large.add(head)
        elif line.way is LineWay.PASS:
            self._pass_piece(line, message, LinePart.START, head)

    def _pass_piece(self, line: LongLine, message: RpcMessage, part: LinePart, piece: bytes) -> None:
        if line.outline is not None and line.outline.is_closed:  # a message of its own, with more behind it
            self._refuse(line, message)
        else:
            self._client.write_piece(part, piece)

    def _refuse(self, line: LongLine, message: RpcMessage) -> None:
        """Spoil a line that the client could take for another message than the one it began as."""
        line.message, line.way = None, LineWay.DROP
        self._client.break_line()
        self._session.refuse_answer(message, message.line[:LONGEST_NOISE])

    def _is_same(self, outline: Outline, message: RpcMessage) -> bool:
        whole = read_strictly(outline.text)
        request = None if whole is None else self._requests.find(whole.key)
        if whole is None or (whole.is_answer and (request is None or self._is_screened(request))):
            return False
        return (whole.method, whole.key, whole.is_answer) == (message.method, message.key, message.is_answer)

    def _is_screened(self, request: ClientRequest | None) -> bool:
        return request is not None and self._gate is not None and self._gate.screens(request)

    def _choose_way(self, message: RpcMessage) -> LineWay:
        if self._gate is not None and self._gate.must_see(message):
            return LineWay.CHECK
        if not message.is_answer:
            return LineWay.PASS
        request = self._requests.find(message.key)
        if message.key is None:
            is_ours = not self._requests.has_sent
        else:
            is_ours = request is None or request.state is RequestState.HELD
        if is_ours:  # or nobody's
            return LineWay.DROP
        is_call = all(each.is_call for each in self._requests) if request is None else request.is_call
        return LineWay.CUT if self._result_bytes and is_call and not message.is_error else LineWay.PASS

    def _may_list_tools(self, message: RpcMessage) -> bool:
        return message.is_answer and any(each.method == "tools/list" for each in self._requests)

    def _continue(self, line: LongLine, part: LinePart, piece: bytes) -> None:
        line.piece_ns = monotonic_ns()
        line.size += len(piece)
        if line.outline is not None:
            line.outline.add(piece)
        if line.gathered is not None:
            self._gather(line, piece)
        if line.large is not None:
            line.large.add(piece)
        if part is LinePart.END:
            self._line = None
            if line.way is LineWay.CHECK:
                self._end_checked(line, piece)
            elif line.message is not None:
                self._end(line, line.message, piece)
        elif line.way is LineWay.PASS and line.message is not None:
            self._pass_piece(line, line.message, part, piece)

    def _gather(self, line: LongLine, piece: bytes) -> None:
        """Gather a piece, unless the line is longer than what may be kept of it."""
        if line.gathered is not None and line.size <= self._most_gathered(line):
            line.gathered += piece
        else:
            line.gathered = None

    def _most_gathered(self, line: LongLine) -> int:
        """Return the limit: that of a list, unless it may be the answer to something else."""
        if line.way is not LineWay.CHECK or line.message is None or self._memory.is_own(line.message.id):
            return MOST_GATHERED
        is_list = self._is_screened(self._requests.find(line.message.key))
        return MOST_GATHERED if is_list else MOST_UNDECIDED

    def _end_checked(self, line: LongLine, piece: bytes) -> None:
        """Take a long answer as a whole one. One that is too long to be checked is refused."""
        message, most = line.message, self._most_gathered(line)
        if line.gathered is not None:
            self._session.take_from_server(LinePart.WHOLE, bytes(line.gathered))
            return
        if message is None:
            return
        id = id_in_tail(piece) if message.key is None else message.id
        self._server.heard(message)
        if self._memory.is_own(id) and self._gate is not None:
            self._gate.fail_list(id, f"a list is longer than {most} bytes")
        elif (request := self._requests.find(key_of(id))) is not None:
            what = f"was answered with more than {most} bytes, which cannot be checked, while lists are pinned"
            self._guard.fail(request, WrapFailure("RESULT_TOO_LARGE", what, Ending.FINISHED))

    def _end(self, line: LongLine, message: RpcMessage, piece: bytes) -> None:
        if message.key is None:
            id = id_in_tail(piece)
            message = replace(message, id=id, key=key_of(id))
            if message.is_request and (new_id := self._questions.open(id)) is not None:
                piece = replace_id_in_tail(piece, new_id) or piece
        if line.outline is not None and not self._is_same(line.outline, message):
            self._refuse(line, message)
            return
        self._server.heard(message)
        request = self._requests.find(message.key) if message.is_answer else None
        if (is_error := error_flag_in_tail(piece)) is not None:
            message = replace(message, result={"isError": is_error})
        if line.large is not None and request is not None:
            self._session.write_large(request, message, line.large)
        elif line.way is LineWay.PASS:
            self._client.write_piece(LinePart.END, piece)
        if request is not None and request.state is not RequestState.HELD:
            whole = read_line(bytes(line.gathered)) if line.gathered is not None else None
            self._session.finish(request, whole or message, line.size)
        if message.is_answer:
            self._guard.answer_stopping()

    # --- time ----------------------------------------------------------------------------------------------------

    @property
    def next_due_ns(self) -> int:
        if self._line is None:
            return NEVER_NS
        return min(self._line.piece_ns + LINE_STALL_MS * NS_PER_MS, self._line.begun_ns + LINE_LIMIT_MS * NS_PER_MS)

    def postpone_limits(self, now_ns: int) -> None:
        """Look at the limits later while a line may be the answer to any request."""
        if self._line is not None and self._line.message is not None:
            self._guard.postpone(now_ns + LINE_LOOK_MS * NS_PER_MS)

    def check(self, now_ns: int, *, is_client_slow: bool) -> None:
        if self._line is not None and now_ns >= self.next_due_ns:
            self._line.begun_ns = self._line.piece_ns = now_ns
            if not is_client_slow:
                self._server.kill("stopped in the middle of a line")
