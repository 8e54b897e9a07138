"""The members of a JSON object that routing needs, found with their places by a scanner.

The scanner sees one window of the text at a time, so that a message of 60 MB is neither parsed nor kept in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ..core.value_types import record
from .messages import Key, key_of

WINDOW = 256 * 1024
LONGEST_NAME = 1024
LONGEST_MEMBER = 64 * 1024  # of a member that is read

Path = tuple[str, ...]
Span = tuple[int, int]
Read = Callable[[int, int], bytes]
"""Returns some bytes from a place; nothing at the end."""

# The objects whose members are found, from the outermost one.
_OPENED: frozenset[Path] = frozenset(
    {(), ("params",), ("params", "_meta"), ("result",), ("result", "_meta"), ("error",)}
)
# Possessive: a string of many megabytes must leave no places to return to.
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NESTING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,}\]]*+")
_SPACE = re.compile(rb"\s*+")
_END = -1


@record
class Members:
    """Members of a message: their places, and the texts of those that are short."""

    spans: dict[Path, Span]
    texts: dict[Path, bytes]

    def read(self, *path: str) -> object:
        """Return a member; None if it is absent, null, too long or malformed."""
        try:
            return json.loads(self.texts.get(path, b"null"))
        except ValueError:
            return None

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


def find_members(read: Read) -> Members:
    """Find the members of the object that is the whole text. Raises ValueError where it is none."""
    scanner = _Scanner(read)
    if scanner.next_mark() != ord("{"):
        raise ValueError("not an object")
    scanner.scan_object(())
    if scanner.next_mark() != _END:
        raise ValueError("text behind the object")
    texts = {
        path: scanner.text(start, end)
        for path, (start, end) in scanner.spans.items()
        if end - start <= LONGEST_MEMBER and path not in _OPENED
    }
    return Members(scanner.spans, texts)


class _Scanner:
    """A place in a text, and the members found up to it."""

    def __init__(self, read: Read) -> None:
        self.spans: dict[Path, Span] = {}
        self._read = read
        self._window = b""
        self._base = 0
        self._at = 0

    def text(self, start: int, end: int) -> bytes:
        if self._base <= start and end <= self._base + len(self._window):
            return self._window[start - self._base : end - self._base]
        return self._read(start, end - start)

    def next_mark(self) -> int:
        """Skip white space and return the next byte; -1 at the end."""
        return self._skip(_SPACE)

    def scan_object(self, path: Path) -> None:
        """Find the members of the object that begins here. Of equal names the last one counts."""
        for older in [each for each in self.spans if each[: len(path)] == path and len(each) > len(path)]:
            del self.spans[older]
        self._at += 1
        mark = self.next_mark()
        while mark != ord("}"):
            member = (*path, self._read_name())
            start = self._at
            self._skip_value(member)
            self.spans[member] = (start, self._at)
            mark = self.next_mark()
            if mark == ord(","):
                self._at += 1
                mark = self.next_mark()
                if mark == ord("}"):
                    raise ValueError("no name")
            elif mark != ord("}"):
                raise ValueError("not closed")
        self._at += 1

    def _read_name(self) -> str:
        """Read a name and its colon."""
        start = self._at
        self._skip_string()
        text = self.text(start, self._at) if self._at - start <= LONGEST_NAME else b'""'
        if self.next_mark() != ord(":"):
            raise ValueError("no value")
        self._at += 1
        self.next_mark()
        return str(json.loads(text))

    def _skip_value(self, member: Path) -> None:
        start = self._at
        mark = self.next_mark()
        if mark == ord("{") and member in _OPENED:
            self.scan_object(member)
        elif mark in b"{[" if mark != _END else False:
            self._skip_nested()
        elif mark == ord('"'):
            self._skip_string()
        else:
            self._skip(_SCALAR)
            if self._at == start:
                raise ValueError("no value")

    def _skip_string(self) -> None:
        if self.next_mark() != ord('"'):
            raise ValueError("not a string")
        self._at += 1
        while (mark := self._skip(_INSIDE)) != ord('"'):
            # A backslash at the end of the window: its second half is in the next one.
            if mark == _END or not self._load() or len(self._window) < 2:
                raise ValueError("not closed")
        self._at += 1

    def _skip_nested(self) -> None:
        depth = 0
        while self._is_loaded() or self._load():
            for token in _NESTING.finditer(self._window, self._at - self._base):
                mark = self._window[token.start()]
                self._at = self._base + token.end()
                if mark in b"{[":
                    depth += 1
                elif mark in b"}]":
                    depth -= 1
                    if depth == 0:
                        return
                elif token.end() - token.start() == 1:  # a string that ends behind the window
                    self._at -= 1
                    self._skip_string()
                    break
            else:
                self._at = self._base + len(self._window)
        raise ValueError("not closed")

    def _skip(self, pattern: re.Pattern[bytes]) -> int:
        """Skip the bytes that match, over all windows, and return the next one; -1 at the end."""
        while self._is_loaded() or self._load():
            found = pattern.match(self._window, self._at - self._base)
            end = len(self._window) if found is None else found.end()
            self._at = self._base + end
            if end < len(self._window):
                return self._window[end]
        return _END

    def _is_loaded(self) -> bool:
        return self._at < self._base + len(self._window)

    def _load(self) -> bool:
        """Move the window here. Return False at the end."""
        self._base, self._window = self._at, self._read(self._at, WINDOW)
        return bool(self._window)
