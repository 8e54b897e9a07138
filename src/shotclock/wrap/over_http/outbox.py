"""Messages on their way to an HTTP client: short ones in memory, the middle of long ones in a file."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO

from ...core.value_types import replace
from ..lines import READ_SIZE, id_in_tail, replace_id_in_tail, replace_value
from ..messages import RpcMessage, encode, key_of, read_line, read_long_line

# Of messages that wait for their reader, in memory and in files.
MOST_WAITING_IN_MEMORY = 1024 * 1024
MOST_WAITING = 256 * 1024 * 1024
OVERHEAD = 1024  # of a message in memory
# A reader that is behind delays all messages of its server. After this time it loses its connection instead.
ROOM_WITHIN_S = 10.0
# Of messages that were sent, for clients that resume.
MOST_SENT = 64 * 1024
# A carriage return is a space between the members of a message, and ends a line of an event stream.
_RETURNS = bytes.maketrans(b"\r\n", b"  ")


class Parcel:
    """A message of a server and its bytes. `begin` is all of a short one."""

    def __init__(self, begin: bytes, *, is_long: bool = False) -> None:
        self.begin: bytes = begin.translate(_RETURNS)
        self.end: bytes = b""
        self.is_long = is_long
        self.number = 0  # in its outbox
        self.message: RpcMessage | None = read_long_line(self.begin) if is_long else read_line(self.begin)
        self.is_last = False
        """Whether it is the answer to the request, so that nothing follows."""
        self.error_code: int | None = None  # of such an answer
        self._middle: IO[bytes] | None = None
        self._middle_size = 0

    def add(self, piece: bytes) -> None:
        """Add to a long message. Raises OSError."""
        if self._middle is None:
            self._middle = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._middle.write(piece.translate(_RETURNS))
        self._middle_size += len(piece)

    def finish(self, end: bytes) -> None:
        """Add the last piece, which may have the id of the message."""
        self.end = end.translate(_RETURNS)
        if self.message is not None and self.message.key is None and (id := id_in_tail(end)) is not None:
            self.message = replace(self.message, id=id, key=key_of(id))

    def replace(self, path: tuple[str, ...], new: object) -> None:
        """Send another value at a path of keys, if it is near the begin of the message, or the id at its end."""
        changed = replace_value(self.begin, path, new)
        if changed is not None:
            self.begin = changed
        elif path == ("id",) and isinstance(new, str | int):
            self.end = replace_id_in_tail(self.end, new) or self.end

    @property
    def size(self) -> int:
        return len(self.begin) + self._middle_size + len(self.end)

    @property
    def size_in_memory(self) -> int:
        return len(self.begin) + len(self.end) + OVERHEAD

    def pieces(self) -> Iterator[bytes]:
        yield self.begin
        if self._middle is not None:
            self._middle.seek(0)
            while piece := self._middle.read(READ_SIZE):
                yield piece
        if self.end:
            yield self.end

    def close(self) -> None:
        if self._middle is not None:
            self._middle.close()


def error_parcel(id: object, code: int, message: str, data: object = None) -> Parcel:
    error = {"code": code, "message": message, **({} if data is None else {"data": data})}
    parcel = Parcel(encode({"jsonrpc": "2.0", "id": id, "error": error}).rstrip())
    parcel.error_code = code
    return parcel


class Outbox:
    """Messages for one reader at a time. Without a reader the oldest ones are dropped when there are too many.

    The last ones that were sent are kept, for a client that has lost its connection and resumes.
    """

    def __init__(self, number: str = "") -> None:
        self.number = number
        """The name of a stream that can be resumed."""
        self.lost: int = 0
        self.sent: int = 0  # the number of the last message that was taken
        self._sent = deque[Parcel]()
        self._count = 0
        self._changed = threading.Condition()
        self._waiting = deque[Parcel]()
        self._size = self._size_in_memory = 0
        self._is_ended = False
        self._reader: object = None

    def attach(self) -> object:
        """Return a new reader. It replaces an older one."""
        with self._changed:
            self._reader = object()
            self._changed.notify_all()
            return self._reader

    def resume(self, after: int) -> object | None:
        """Return a reader of the messages after this one; None if they are not all here any more."""
        with self._changed:
            oldest = next((each.number for each in (*self._sent, *self._waiting)), self._count + 1)
            if not oldest - 1 <= after <= self._count or (self._is_ended and after == self._count):
                return None
            while self._sent and self._sent[-1].number > after:
                self._add(self._sent.pop(), at_begin=True)
            self.sent = after
            self._reader = object()
            self._changed.notify_all()
            return self._reader

    def detach(self, reader: object) -> None:
        with self._changed:
            if self._reader is reader:
                self._reader = None
                self._drop_sent(0)
                self._changed.notify_all()

    @property
    def is_read(self) -> bool:
        return self._reader is not None

    def put(self, parcel: Parcel, *, is_last: bool = False) -> None:
        """Add a message. Waits for a reader that is behind, within a limit."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_full and self.is_read), ROOM_WITHIN_S)
            if self._is_full:
                self._reader = None
            if self._is_ended:
                parcel.close()
                return
            while self._is_full:
                self._pop().close()
                self.lost += 1
            parcel.is_last = self._is_ended = is_last
            self._count += 1
            parcel.number = self._count
            self._add(parcel)
            self._changed.notify_all()

    def take(self, reader: object, within_s: float) -> Parcel | None:
        """Return the next message; None after this time, and at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ended or self._reader is not reader, within_s)
            if not self._waiting or self._reader is not reader:
                return None
            parcel = self._pop()
            self.sent = parcel.number
            self._sent.append(parcel)
            self._drop_sent(1)  # not the one that the reader sends now
            return parcel

    def _drop_sent(self, kept: int) -> None:
        while len(self._sent) > kept and sum(each.size + OVERHEAD for each in self._sent) > MOST_SENT:
            self._sent.popleft().close()

    def is_over(self, reader: object) -> bool:
        """Return whether nothing more will come: all was read, or another reader has replaced this one."""
        with self._changed:
            return self._reader is not reader or (self._is_ended and not self._waiting)

    @property
    def size(self) -> int:
        return self._size

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def close(self) -> None:
        """Drop all messages, also those that come."""
        with self._changed:
            self._is_ended = True
            self._reader = None
            while self._waiting:
                self._pop().close()
            self._sent.clear()  # one of them may be on its way
            self._changed.notify_all()

    def _add(self, parcel: Parcel, *, at_begin: bool = False) -> None:
        (self._waiting.appendleft if at_begin else self._waiting.append)(parcel)
        self._size += parcel.size
        self._size_in_memory += parcel.size_in_memory

    def _pop(self) -> Parcel:
        parcel = self._waiting.popleft()
        self._size -= parcel.size
        self._size_in_memory -= parcel.size_in_memory
        self._changed.notify_all()
        return parcel

    @property
    def _is_full(self) -> bool:
        return self._size_in_memory >= MOST_WAITING_IN_MEMORY or self._size >= MOST_WAITING
