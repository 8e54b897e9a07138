"""Messages of any length over HTTP: short ones in memory, long ones in a file.

A member that has to change is replaced on the way out. Everything else passes as the bytes that came.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from typing import IO

from .members import Members, Span, find_members

MOST_IN_MEMORY = 256 * 1024
PIECE = 64 * 1024
# Between the members of a message an end of line is a space, and inside a string there is none.
_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")


class Payload:
    """The bytes of one message, without ends of line."""

    def __init__(self, content: bytes = b"") -> None:
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._stored = 0
        self._patches: list[tuple[int, int, bytes]] = []
        if content:
            self.add(content)

    def add(self, piece: bytes) -> None:
        piece = piece.translate(_LINE_ENDS)
        self._stored += len(piece)
        if self._file is not None:
            self._file.write(piece)
            return
        self._memory += piece
        if len(self._memory) > MOST_IN_MEMORY:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.write(self._memory)
            self._memory = bytearray()

    @property
    def size(self) -> int:
        return self._stored + sum(len(new) - (end - start) for start, end, new in self._patches)

    @property
    def is_long(self) -> bool:
        return self._file is not None

    @property
    def size_in_memory(self) -> int:
        return len(self._memory)

    def scan(self) -> Members | None:
        """Find the members of the message; None if it is no JSON object."""
        try:
            if self._file is None:
                json.loads(self._memory)
            else:
                self._file.flush()
            return find_members(self._read)
        except (ValueError, RecursionError):
            return None

    def _read(self, start: int, size: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[start : start + size])
        if self._file.closed:
            raise OSError("the message was dropped")
        return os.pread(self._file.fileno(), size, start)

    def replace(self, span: Span, new: bytes) -> None:
        """Send other bytes in place of these."""
        self._patches = sorted([*self._patches, (*span, new)])

    def pieces(self) -> Iterator[bytes]:
        at = 0
        for start, end, new in self._patches:
            yield from self._between(at, start)
            yield new
            at = end
        yield from self._between(at, self._stored)

    def _between(self, start: int, end: int) -> Iterator[bytes]:
        while start < end and (piece := self._read(start, min(PIECE, end - start))):
            yield piece
            start += len(piece)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
