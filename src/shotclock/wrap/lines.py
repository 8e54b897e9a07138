"""Lines of a stream: short ones are parsed, long ones pass in pieces and are read only at both ends.

A result of 60 MB must not be gathered: the process in front of every server of every client has to stay small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum, auto

LONGEST_PARSED = 64 * 1024
# Of a client, where a policy has to read the whole line. A longer one is refused.
LONGEST_CHECKED = 4 * 1024 * 1024
READ_SIZE = 64 * 1024
# Held back of a long line until its end is known: enough for the members behind a large `params` or `result`.
TAIL_SIZE = 2 * 1024

_ID = rb'(-?[0-9]{1,400}|"(?:[^"\\]|\\.){0,400}")'
_PLAIN = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*'
# Quotes inside strings are escaped, so these find members of the outermost object only, and of its `result`.
_ID_IN_HEAD = re.compile(rb"\s*\{\s*(?:" + _PLAIN + rb',\s*)*"id"\s*:\s*' + _ID + rb"\s*[,}]")
_ID_IN_TAIL = re.compile(rb',\s*"id"\s*:\s*' + _ID + rb"\s*(?:,\s*" + _PLAIN + rb")*\}\s*\Z")
_ERROR_IN_TAIL = re.compile(
    rb'[,{]\s*"isError"\s*:\s*(true|false)\s*(?:,\s*"resultType"\s*:\s*"[^"\\]*"\s*)?\}\s*'
    rb'(?:,\s*(?:"id"\s*:\s*' + _ID + rb"\s*|" + _PLAIN + rb"))*\}\s*\Z"
)
_STRING_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_INSIDE = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_BETWEEN = re.compile(rb'[^"{}\[\]]*+')
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


class LinePart(Enum):
    """The part of a line that a piece is."""

    WHOLE = auto()
    START = auto()
    MIDDLE = auto()
    END = auto()


class LineSplitter:
    """Splitter of a stream into whole lines, and into pieces of those that are too long to be parsed."""

    def __init__(self, longest: int = LONGEST_PARSED) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._is_long = False

    @property
    def is_inside_long_line(self) -> bool:
        return self._is_long

    def split(self, chunk: bytes) -> Iterator[tuple[LinePart, bytes]]:
        """Yield the pieces that are complete. The last piece of a line has its end of line."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            yield from self._finish(self._take_rest(chunk[start : end + 1]))
            start = end + 1
        self._rest += chunk[start:]
        if self._is_long or len(self._rest) > self._longest:
            rest = self._take_rest(b"")
            self._rest += rest[-TAIL_SIZE:]
            if piece := rest[:-TAIL_SIZE]:
                yield (LinePart.MIDDLE if self._is_long else LinePart.START), piece
            self._is_long = True

    def _take_rest(self, end: bytes) -> bytes:
        if not self._rest:
            return end
        whole = bytes(self._rest + end)
        self._rest.clear()
        return whole

    def _finish(self, line: bytes) -> Iterator[tuple[LinePart, bytes]]:
        if self._is_long:
            self._is_long = False
            yield LinePart.END, line
        elif len(line) > self._longest:
            yield LinePart.START, line[:-TAIL_SIZE]
            yield LinePart.END, line[-TAIL_SIZE:]
        else:
            yield LinePart.WHOLE, line

    def finish(self) -> Iterator[tuple[LinePart, bytes]]:
        """Yield the rest of a stream that ended without an end of line."""
        rest = self._take_rest(b"")
        if rest or self._is_long:
            yield from self._finish(rest + b"\n")


class Outline:
    """The outermost object of a long line, with 0 in place of each list and object inside."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._depth = 0
        self._is_in_string = False
        self._escape = b""  # a backslash at the end of a piece

    @property
    def is_closed(self) -> bool:
        """Return whether the object has ended, so that its reader may act on it."""
        return self._depth <= 0

    @property
    def text(self) -> bytes:
        """Return the object; nothing if its own members are too long."""
        return bytes(self._text) if len(self._text) <= TAIL_SIZE else b""

    def add(self, piece: bytes) -> None:
        piece, at = self._escape + piece, 0
        self._escape = b""
        if b"\r" in piece.rstrip(b"\r\n"):
            self._text += b"\r"
        while at < len(piece):
            between = _INSIDE if self._depth > 1 else _BETWEEN
            match = (_STRING_REST if self._is_in_string else between).match(piece, at)
            end = at if match is None else match.end()
            self._keep(piece[at:end])
            mark = piece[end : end + 1]
            if mark == b"\\":
                self._escape = mark
            elif mark == b'"':
                self._is_in_string = not self._is_in_string
                self._keep(mark)
            elif mark:
                self._note_bracket(mark)
            at = end + 1

    def _note_bracket(self, mark: bytes) -> None:
        if mark in b"{[":
            self._keep(b"0" if self._depth else mark)
            self._depth += 1
        else:
            self._depth -= 1
            if self._depth <= 0:
                self._text += mark

    def _keep(self, text: bytes) -> None:
        if self._depth <= 1 and len(self._text) <= TAIL_SIZE:
            self._text += text


def read_head(head: bytes) -> dict[str, object]:
    """Return the members of a JSON object whose end is cut off. A cut value is missing or, as `params`, incomplete."""
    text = head.decode("utf-8", "ignore")
    return _read_members(text, _skip(text, 0))


def _read_members(text: str, at: int) -> dict[str, object]:
    members: dict[str, object] = {}
    if text[at : at + 1] != "{":
        return members
    at += 1
    while True:
        try:
            key, at = _DECODER.raw_decode(text, _skip(text, at))
            at = _skip(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                return members
            at = _skip(text, at + 1)
            members[key] = None
            item, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            if text[at : at + 1] == "{" and members and (key := [*members][-1]) in ("params", "_meta"):
                members[key] = _read_members(text, at)
            return members
        if end >= len(text):  # the digits of a number may be cut
            return members
        members[key] = item
        at = _skip(text, end)
        if text[at : at + 1] != ",":
            return members
        at += 1


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACE and at < len(text):
        at += 1
    return at


def id_in_tail(tail: bytes) -> object:
    """Return the id at the end of a long line; None if there is none."""
    found = _ID_IN_TAIL.search(tail)
    return None if found is None else json.loads(found[1])


def error_flag_in_tail(tail: bytes) -> bool | None:
    """Return `isError` of the result that a long line ends with; None if it is not there."""
    found = _ERROR_IN_TAIL.search(tail)
    return None if found is None else found[1] == b"true"


def replace_id_in_head(line: bytes, new_id: str | int) -> bytes | None:
    """Return the line with another id, and every other byte unchanged; None if the id is not near its start."""
    return _replace(line, _ID_IN_HEAD.match(line), new_id)


def replace_id_in_tail(line: bytes, new_id: str | int) -> bytes | None:
    """Return the line with another id, and every other byte unchanged; None if the id is not near its end."""
    return _replace(line, _ID_IN_TAIL.search(line, max(0, len(line) - TAIL_SIZE)), new_id)


def _replace(line: bytes, found: re.Match[bytes] | None, new_id: str | int) -> bytes | None:
    if found is None:
        return None
    return line[: found.start(1)] + json.dumps(new_id).encode() + line[found.end(1) :]
