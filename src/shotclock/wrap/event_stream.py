"""Messages from HTTP bodies: collected in memory or, if they are long, in a file; and events of an event stream."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from typing import IO

from ..core.value_types import value
from .lines import LONGEST_PARSED, READ_SIZE, TAIL_SIZE

LARGEST_MESSAGE = 1024 * 1024 * 1024
LONGEST_FIELD = 8 * 1024  # of an event, except its data

_END_OF_LINE = re.compile(rb"\r\n?|\n")
# Legal between the parts of a JSON text only, so a space says the same.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class MessageTooLarge(Exception):
    """A message that is larger than the limit, or for which there is no room on the disk."""


class CollectedMessage:
    """The bytes of one message, as one line without its end."""

    def __init__(self, text: bytes = b"") -> None:
        self._kept = bytearray(text)
        self._tail = b""
        self._file: IO[bytes] | None = None
        self.size = len(text)

    @property
    def is_long(self) -> bool:
        return self._file is not None

    @property
    def head(self) -> bytes:
        """Return the first bytes, or all bytes of a message that is not long."""
        return bytes(self._kept)

    @property
    def tail(self) -> bytes:
        return self._tail

    def add(self, piece: bytes) -> None:
        """Add bytes. Raises MessageTooLarge."""
        piece = piece.translate(_ONE_LINE)
        self.size += len(piece)
        if self._file is None and self.size <= LONGEST_PARSED:
            self._kept += piece
            return
        if self.size > LARGEST_MESSAGE:
            raise MessageTooLarge(f"it is longer than {LARGEST_MESSAGE} bytes")
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
                self._file.write(self._kept)
                self._tail = bytes(self._kept[-TAIL_SIZE:])
            self._file.write(piece)
        except OSError as error:
            raise MessageTooLarge(f"it cannot be stored in {tempfile.gettempdir()}: {error.strerror}") from None
        self._tail = (self._tail + piece)[-TAIL_SIZE:]

    def body(self) -> bytes | IO[bytes]:
        """Return the message as the body of a request."""
        if self._file is None:
            return bytes(self._kept)
        self._file.seek(0)
        return self._file

    def pieces(self) -> Iterator[bytes]:
        """Yield the message and the end of its line."""
        if self._file is None:
            yield bytes(self._kept) + b"\n"
            return
        self._file.seek(0)
        while piece := self._file.read(READ_SIZE):
            yield piece
        yield b"\n"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@value
class StreamEvent:
    """An event of a stream."""

    kind: str
    data: CollectedMessage


class EventReader:
    """Reader of an event stream. `last_id` and `retry_ms` are those that the server gave last."""

    def __init__(self) -> None:
        self.last_id = ""
        self.retry_ms: int | None = None
        self._kind = "message"
        self._data = CollectedMessage()
        self._line = bytearray()
        self._is_in_data = False
        self._skips_line_feed = False

    def read(self, chunk: bytes) -> Iterator[StreamEvent]:
        """Yield the events that end in a chunk. Raises MessageTooLarge."""
        at = 1 if self._skips_line_feed and chunk[:1] == b"\n" else 0
        self._skips_line_feed = False
        while at < len(chunk):
            end = _END_OF_LINE.search(chunk, at)
            self._take(chunk[at : len(chunk) if end is None else end.start()])
            if end is None:
                return
            at = end.end()
            self._skips_line_feed = end[0] == b"\r" and at == len(chunk)
            event = self._end_line()
            if event is not None:
                yield event

    def _take(self, piece: bytes) -> None:
        """Take a piece of a line. The data of an event pass on at once, since they may be long."""
        if self._is_in_data:
            self._data.add(piece)
            return
        self._line += piece
        if len(self._line) > len(b"data: ") and self._line.startswith(b"data:"):
            self._begin_data()
        elif len(self._line) > LONGEST_FIELD:
            del self._line[LONGEST_FIELD:]

    def _begin_data(self) -> None:
        if self._data.size:
            self._data.add(b"\n")
        self._data.add(bytes(self._line[5:]).removeprefix(b" "))
        self._is_in_data = True

    def _end_line(self) -> StreamEvent | None:
        if not self._is_in_data and self._line.startswith(b"data:"):
            self._begin_data()
        line = bytes(self._line)
        was_data, self._is_in_data = self._is_in_data, False
        self._line.clear()
        if was_data:
            return None
        if not line:
            event = StreamEvent(self._kind, self._data)
            self._kind, self._data = "message", CollectedMessage()
            return event
        name, _, content = line.partition(b":")
        text = content.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"event":
            self._kind = text or "message"
        elif name == b"id" and "\0" not in text and text.isprintable():
            self.last_id = text
        elif name == b"retry" and text.isascii() and text.isdecimal():
            self.retry_ms = int(text[:9])
        return None
