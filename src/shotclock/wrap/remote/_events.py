"""Messages from HTTP bodies, and events of an event stream."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .._lines import LONGEST_LINE
from .._messages import RpcMessage, read_line

LONGEST_FIELD = 8 * 1024  # of an event, except its data

_END_OF_LINE = re.compile(rb"\r\n?|\n")
# Legal between the parts of a JSON text only, so a space says the same.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class MessageTooLarge(Exception):
    """A message that is larger than the limit."""


class CollectedMessage:
    """The bytes of one message, as one line without its end."""

    def __init__(self, text: bytes = b"") -> None:
        self._text = bytearray()
        self.add(text)

    @property
    def size(self) -> int:
        return len(self._text)

    @property
    def text(self) -> bytes:
        return bytes(self._text)

    def add(self, piece: bytes) -> None:
        """Add bytes. Raises MessageTooLarge."""
        piece = piece.translate(_ONE_LINE)
        self._text += piece if self._text else piece.lstrip()
        if len(self._text) > LONGEST_LINE:
            raise MessageTooLarge(f"it is longer than {LONGEST_LINE} bytes")

    def parse(self) -> RpcMessage | None:
        """Return the message; None for any other text."""
        return read_line(self.text)


class EventReader:
    """Reader of an event stream. `last_id` and `retry_ms` are those that the server gave last."""

    def __init__(self) -> None:
        self.last_id: str = ""
        self.retry_ms: int = 1_000
        self.restart()

    def restart(self) -> None:
        """Drop the part of an event with which a stream has ended."""
        self._kind, self._data = "message", CollectedMessage()
        self._line = bytearray()
        self._is_in_data = self._skips_line_feed = False

    def read(self, chunk: bytes) -> Iterator[CollectedMessage]:
        """Yield the messages that end in a chunk. Raises MessageTooLarge."""
        at = 1 if self._skips_line_feed and chunk[:1] == b"\n" else 0
        self._skips_line_feed = False
        while at < len(chunk):
            end = _END_OF_LINE.search(chunk, at)
            self._add(chunk[at : len(chunk) if end is None else end.start()])
            if end is None:
                return
            at = end.end()
            self._skips_line_feed = end[0] == b"\r" and at == len(chunk)
            message = self._end_line()
            if message is not None:
                yield message

    def _add(self, piece: bytes) -> None:
        """Add a piece of a line. The data of an event may be long and are kept apart."""
        if self._is_in_data:
            self._data.add(piece)
            return
        self._line += piece
        if self._line.startswith(b"data:"):
            self._data.add(b"\n" + self._line[5:])
            self._is_in_data = True
        del self._line[LONGEST_FIELD:]

    def _end_line(self) -> CollectedMessage | None:
        was_data, self._is_in_data = self._is_in_data, False
        line = self._line.decode("utf-8", "replace")
        self._line.clear()
        if was_data:
            return None
        if not line:
            kind, data = self._kind, self._data
            self._kind, self._data = "message", CollectedMessage()
            return data if kind == "message" and data.size else None
        name, _, content = line.partition(":")
        content = content.removeprefix(" ")
        if name == "event":
            self._kind = content
        elif name == "id" and content.isprintable():
            self.last_id = content
        elif name == "retry" and content.isascii() and content.isdecimal():
            self.retry_ms = int(content[:9])
        return None
