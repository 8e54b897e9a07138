"""Messages from HTTP bodies: collected in memory or, if they are long, in a file; and events of an event stream."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator

from ..lines import LONGEST_PARSED, READ_SIZE, TAIL_SIZE, id_in_tail
from ..messages import RpcMessage, key_of, read_line, read_long_line

LARGEST_MESSAGE = 1024 * 1024 * 1024
# A longer message is read at both ends only.
LONGEST_READ = 1024 * 1024
LONGEST_FIELD = 8 * 1024  # of an event, except its data

_END_OF_LINE = re.compile(rb"\r\n?|\n")
# Legal between the parts of a JSON text only, so a space says the same.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")


class MessageTooLarge(Exception):
    """A message that is larger than the limit, or for which there is no room on the disk."""


class CollectedMessage:
    """The bytes of one message, as one line without its end."""

    def __init__(self, text: bytes = b"") -> None:
        self.size: int = 0
        self._file = tempfile.SpooledTemporaryFile(LONGEST_PARSED)  # noqa: SIM115
        self.add(text)

    def add(self, piece: bytes) -> None:
        """Add bytes. Raises MessageTooLarge."""
        piece = piece.translate(_ONE_LINE)
        if not self.size:
            piece = piece.lstrip()
        self.size += len(piece)
        if self.size > LARGEST_MESSAGE:
            raise MessageTooLarge(f"it is longer than {LARGEST_MESSAGE} bytes")
        try:
            self._file.write(piece)
            self._file.flush()
        except OSError as error:
            raise MessageTooLarge(f"it cannot be stored in a temporary file: {error.strerror}") from None

    def read(self, start: int = 0, most: int = -1) -> bytes:
        """Return a part of a message that is complete."""
        self._file.seek(start)
        return self._file.read(most)

    def parse(self) -> RpcMessage | None:
        """Return the message; None for any other text."""
        if self.size <= LONGEST_READ:
            return read_line(self.read())
        message = read_long_line(self.read(0, LONGEST_PARSED))
        if message is not None and message.key is None:
            message.id = id_in_tail(self.read(self.size - TAIL_SIZE))
            message.key = key_of(message.id)
        return message

    def pieces(self) -> Iterator[bytes]:
        self._file.seek(0)
        while piece := self._file.read(READ_SIZE):
            yield piece

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


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
        """Add a piece of a line. The data of an event are stored at once, since they may be long."""
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
