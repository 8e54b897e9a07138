"""Messages of any length over HTTP: short ones in memory, long ones in a file, members found by a scanner.

A message of 60 MB is never parsed as a whole: the scanner finds the few members that routing needs, with their places,
and a changed member is replaced on the way out. Everything else passes as the bytes that came.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from typing import IO

from ..core.value_types import record
from .messages import Key, key_of

MOST_IN_MEMORY = 256 * 1024
PIECE = 64 * 1024
LONGEST_MEMBER = 64 * 1024  # of a member that is read

Path = tuple[str, ...]
Span = tuple[int, int]
# The objects whose members are found, from the outermost one.
_OPENED: frozenset[Path] = frozenset(
    {(), ("params",), ("params", "_meta"), ("result",), ("result", "_meta"), ("error",)}
)
# Possessive: a string of many megabytes must leave no places to return to.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb"|[{}\[\]:,]", re.DOTALL)
_NESTING = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_TEXT = re.compile(_STRING, re.DOTALL)
_SCALAR = re.compile(rb"[^\s,}\]]+")
_SPACE = re.compile(rb"\s*")
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
    def size_in_memory(self) -> int:
        return len(self._memory)

    def scan(self) -> Members | None:
        """Find the members of the message; None if it is no JSON object."""
        try:
            if self._file is None:
                content = bytes(self._memory)
                json.loads(content)
                return _scan(content)
            self._file.flush()
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _scan(mapped)
        except (ValueError, RecursionError):
            return None

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
        if self._file is None:
            if start < end:
                yield bytes(self._memory[start:end])
            return
        while start < end:
            piece = os.pread(self._file.fileno(), min(PIECE, end - start), start)
            if not piece:
                return
            yield piece
            start += len(piece)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@record
class Members:
    """Members of a message: their places, and the values of those that are short."""

    spans: dict[Path, Span]
    texts: dict[Path, bytes]

    def read(self, *path: str) -> object:
        """Return a member; None if it is absent, null or too long."""
        text = self.texts.get(path)
        return None if text is None else json.loads(text)

    def __contains__(self, path: Path) -> bool:
        return path in self.spans

    @property
    def method(self) -> str | None:
        method = self.read("method")
        return method if isinstance(method, str) else None

    @property
    def key(self) -> Key | None:
        return key_of(self.read("id"))

    @property
    def is_message(self) -> bool:
        return self.read("jsonrpc") == "2.0" and (self.method is not None or self.is_answer)

    @property
    def is_answer(self) -> bool:
        return ("result",) in self.spans or ("error",) in self.spans


def _scan(data: bytes | mmap.mmap) -> Members:
    """Find members. Raises ValueError where the text is no object."""
    spans: dict[Path, Span] = {}
    at = _skip_space(data, 0)
    if data[at : at + 1] != b"{":
        raise ValueError("not an object")
    _scan_object(data, at, (), spans)
    short = {path: span for path, span in spans.items() if span[1] - span[0] <= LONGEST_MEMBER}
    return Members(spans, {path: bytes(data[start:end]) for path, (start, end) in short.items()})


def _scan_object(data: bytes | mmap.mmap, at: int, path: Path, spans: dict[Path, Span]) -> int:
    """Add the members of the object that begins here, and return its end. Of equal names the last one counts."""
    for older in [each for each in spans if each[: len(path)] == path and len(each) > len(path)]:
        del spans[older]
    at += 1
    while True:
        token = _TOKEN.search(data, at)
        if token is None:
            raise ValueError("not closed")
        at = token.end()
        if token[0] == b"}":
            return at
        if token[0] == b",":
            continue
        if token[0][:1] != b'"':
            raise ValueError("not a name")
        name = json.loads(token[0])
        at = _skip_space(data, at)
        if data[at : at + 1] != b":":
            raise ValueError("no value")
        start = _skip_space(data, at + 1)
        member = (*path, name)
        if data[start : start + 1] == b"{" and member in _OPENED:
            at = _scan_object(data, start, member, spans)
        else:
            at = _end_of_value(data, start)
        spans[member] = (start, at)


def _end_of_value(data: bytes | mmap.mmap, start: int) -> int:
    first = data[start : start + 1]
    if first not in (b"{", b"["):
        found = (_TEXT if first == b'"' else _SCALAR).match(data, start)
        if found is None:
            raise ValueError("no value")
        return found.end()
    depth = 0
    for token in _NESTING.finditer(data, start):
        mark = data[token.start() : token.start() + 1]
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return token.end()
    raise ValueError("not closed")


def _skip_space(data: bytes | mmap.mmap, at: int) -> int:
    found = _SPACE.match(data, at)
    return at if found is None else found.end()
