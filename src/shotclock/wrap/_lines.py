"""Lines of a stream: whole ones up to a bound. Of a longer one only both ends are kept, so that it can be answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

READ_SIZE = 64 * 1024
LONGEST_LINE = 16 * 1024 * 1024
END_SIZE = 4 * 1024  # kept of both ends of a longer line

# Quotes inside strings are escaped, so these find members of the outermost object only.
_ID = rb'(-?[0-9]{1,400}|"(?:[^"\\]|\\.){0,400}")'
_PLAIN = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*'
_ID_IN_HEAD = re.compile(rb"\s*\{\s*(?:" + _PLAIN + rb',\s*)*"id"\s*:\s*' + _ID + rb"\s*[,}]")
_ID_IN_TAIL = re.compile(rb',\s*"id"\s*:\s*' + _ID + rb"\s*(?:,\s*" + _PLAIN + rb")*\}\s*\Z")
_MEMBERS_SIZE = 2 * 1024  # of the members behind a large `params` or `result`
_SCALAR = rb'(?:-?[0-9]{1,400}|"(?:[^"\\]|\\.){0,400}"|null)'
_MEMBER = rb'"(?:jsonrpc|id|method)"\s*:\s*' + _SCALAR + rb"\s*"
_HEAD = re.compile(rb"\s*\{\s*((?:" + _MEMBER + rb",\s*)*)")
_TAIL = re.compile(rb",\s*(" + _MEMBER + rb"(?:,\s*" + _MEMBER + rb")*)\}\s*\Z")


class LongLine(NamedTuple):
    """A line that is too long to be passed: its beginning, its end, and how long it was."""

    head: bytes
    tail: bytes
    size: int

    def read_members(self) -> dict[str, object]:
        """Return `id` and `method`, as far as they are near an end of the line."""
        head, tail = _HEAD.match(self.head), _TAIL.search(self.tail)
        parts = [head[1].rstrip(b", \t\r\n") if head else b"", tail[1] if tail else b""]
        try:
            members: dict[str, object] = json.loads(b"{" + b",".join(part for part in parts if part) + b"}")
        except ValueError:
            return {}
        return members


class LineSplitter:
    """Splitter of a stream into lines."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._head = b""
        self._dropped = 0

    def split(self, chunk: bytes) -> Iterator[bytes | LongLine]:
        """Yield the lines that are complete, with their ends of line."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            yield self._finish(chunk[start : end + 1])
            start = end + 1
        self._add(chunk[start:])

    def finish(self) -> Iterator[bytes | LongLine]:
        """Yield the rest of a stream that ended without an end of line."""
        if self._rest or self._head:
            yield self._finish(b"\n")

    def _add(self, piece: bytes) -> None:
        self._rest += piece
        if self._head or len(self._rest) > self._longest:
            self._head = self._head or bytes(self._rest[:END_SIZE])
            left_out = max(0, len(self._rest) - END_SIZE)
            self._dropped += left_out
            del self._rest[:left_out]

    def _finish(self, end: bytes) -> bytes | LongLine:
        if not self._rest and not self._head and len(end) <= self._longest:
            return end
        self._add(end)
        line, head, size = bytes(self._rest), self._head, self._dropped + len(self._rest)
        self._rest, self._head, self._dropped = bytearray(), b"", 0
        return LongLine(head, line, size) if head else line


def replace_id(line: bytes, new_id: str | int) -> bytes | None:
    """Return the line with another id, every other byte as it was; None if the id is near neither end."""
    found = _ID_IN_HEAD.match(line) or _ID_IN_TAIL.search(line, max(0, len(line) - _MEMBERS_SIZE))
    return None if found is None else line[: found.start(1)] + json.dumps(new_id).encode() + line[found.end(1) :]
