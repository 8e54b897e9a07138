"""The log of a job: two pages of limited size, and an index of the times and line numbers in them.

An entry of the index is a line of four numbers: wall-clock milliseconds, bytes and lines written before, and the inode
of the page that begins there, or 0 for a mark of time. The first page that does not fit is dropped, and the numbers
stay those of the whole output.
"""

from __future__ import annotations

import contextlib
import os
from typing import BinaryIO

from ..core.limits import WallTime
from ..core.value_types import record, value
from ..supervise.clock import wall_time

# The size of a page; the one before it is kept as well.
LOG_LIMIT = 1_000_000
# The least time between two marks: `--since` is that exact.
MARK_MS = 1_000
# A page may be turned between the opening of the two.
_ATTEMPTS = 5
_CHUNK = 65536


@value
class _Entry:
    at_ms: int
    offset: int
    lines: int
    inode: int = 0

    def is_before(self, mark: _Entry) -> bool:
        """Return whether the other is a mark of time in the page that begins here, or later."""
        return not mark.inode and mark.offset >= self.offset

    def as_line(self) -> str:
        return f"{self.at_ms} {self.offset} {self.lines} {self.inode}\n"


class Logbook:
    """Log of the work's output, for its only writer."""

    def __init__(self, path: str, file: int) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file).st_size
        page = _find_page(_read_index(path), os.fstat(file).st_ino)
        if page is None:
            page = _Entry(wall_time().ms, 0, 0, os.fstat(file).st_ino)
            self._add(page)
        self._page = page
        self._offset, self._lines = page.offset + self._size, page.lines
        if self._size:  # a further attempt appends
            with contextlib.suppress(OSError), open(path, "rb") as earlier:
                self._lines += earlier.read().count(b"\n")
        self._marked_ms = 0

    def take(self, pipe: int) -> None:
        for _ in range(64):  # a flood must not keep us from the rest of our work
            try:
                chunk = os.read(pipe, _CHUNK)
            except OSError:
                return
            if not chunk:
                return
            self.write(chunk)

    def write(self, chunk: bytes) -> bool:
        """Append a piece of output, and return whether all was written. A full disk loses it, and stops nothing."""
        now_ms = wall_time().ms
        if self._size > LOG_LIMIT:
            self._turn_page(now_ms)
        if abs(now_ms - self._marked_ms) >= MARK_MS:
            self._marked_ms = now_ms
            self._add(_Entry(now_ms, self._offset, self._lines))
        with contextlib.suppress(OSError):
            written = os.write(self._file, chunk)
            self._size += written
            self._offset += written
            self._lines += chunk[:written].count(b"\n")
            return written == len(chunk)
        return False

    def close(self) -> None:
        os.close(self._file)

    def _add(self, entry: _Entry) -> None:
        with contextlib.suppress(OSError), _append(f"{self._path}.index") as file:
            file.write(entry.as_line().encode())

    def _turn_page(self, now_ms: int) -> None:
        with contextlib.suppress(OSError):
            fresh = f"{self._path}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(fresh, flags, 0o600)
            page = _Entry(now_ms, self._offset, self._lines, os.fstat(file).st_ino)
            kept = [entry for entry in _read_index(self._path) if entry == self._page or self._page.is_before(entry)]
            # The index has the new page before a reader can open it.
            with _append(f"{fresh}.index") as index:
                index.truncate(0)
                index.write("".join(entry.as_line() for entry in (*kept, page)).encode())
            os.replace(f"{fresh}.index", f"{self._path}.index")
            os.replace(self._path, f"{self._path}.1")
            os.replace(fresh, self._path)
            os.dup2(file, self._file)
            os.close(file)
            self._page, self._size = page, 0


def _append(path: str) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def _read_index(path: str) -> list[_Entry]:
    entries = []
    with contextlib.suppress(OSError), open(f"{path}.index", encoding="ascii", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError):  # the last one may be half written
                entries.append(_Entry(*map(int, line.split())))
    return entries


@record
class LogPart:
    """Part of a log, beginning at byte `offset` and at line `first_line` of the whole output."""

    content: bytes = b""
    offset: int = 0
    first_line: int = 1

    @property
    def end(self) -> int:
        return self.offset + len(self.content)

    @property
    def next_line(self) -> int:
        """Return the number of the line after the last whole one."""
        return self.first_line + self.content.count(b"\n")

    def drop(self, size: int) -> None:
        self.first_line += self.content.count(b"\n", 0, size)
        self.content, self.offset = self.content[size:], self.offset + size

    def keep_from_line(self, number: int) -> None:
        skipped = 0
        for _ in range(number - self.first_line):
            skipped = self.content.find(b"\n", skipped) + 1
            if not skipped:
                skipped = len(self.content)
                break
        self.drop(skipped)

    def keep_last_lines(self, count: int) -> None:
        place = len(self.content) - self.content.endswith(b"\n")
        for _ in range(count):
            place = self.content.rfind(b"\n", 0, max(place, 0))
            if place < 0:
                return
        self.drop(place + 1)


def _find_page(index: list[_Entry], inode: int) -> _Entry | None:
    return next((entry for entry in reversed(index) if entry.inode == inode), None)


@value
class Log:
    """A log as its readers see it."""

    path: str

    @property
    def files(self) -> tuple[str, ...]:
        return self.path, f"{self.path}.1", f"{self.path}.index"

    def state(self) -> tuple[int, int]:
        """Return a value that changes when output is added."""
        try:
            page = os.stat(self.path)
        except OSError:
            return 0, 0
        return page.st_ino, page.st_size

    def read(self, after: int = 0, *, since: WallTime | None = None) -> LogPart:
        """Return the kept output after that many bytes, and only that written since a time, up to a second more."""
        for _ in range(_ATTEMPTS):
            pages = []
            for name in (f"{self.path}.1", self.path):
                with contextlib.suppress(OSError), open(name, "rb") as file:
                    pages.append((os.fstat(file.fileno()).st_ino, file.read()))
            index = _read_index(self.path)
            bases = [_find_page(index, inode) for inode, _ in pages]
            known = [(base, content) for base, (_, content) in zip(bases, pages, strict=True) if base is not None]
            if not known:  # nothing but the errors of a runner that did not start
                part = LogPart(b"".join(content for _, content in pages))
                break
            first = known[0][0]
            part = LogPart(b"".join(content for _, content in known), first.offset, first.lines + 1)
            if len(known) == 1 or known[1][0].offset == first.offset + len(known[0][1]):
                break
        if since is not None:
            marks = (entry.offset for entry in index if entry.at_ms >= since.ms - MARK_MS)
            after = max(after, next(marks, part.end))
        if after < part.offset:  # the dropped page may have ended in the middle of a line
            after = part.offset + part.content.find(b"\n") + 1
        if after > part.offset:
            part.drop(min(after, part.end) - part.offset)
        return part

    def tail(self, most: int) -> str:
        """Return the end of the log as text, from the beginning of a line where one is near."""
        content = self.read().content
        start = max(0, len(content) - most)
        if start:
            start = content.find(b"\n", start - 1, -1) + 1 or start
        return content[start:].decode("utf-8", "replace")

    def shrink(self, most: int, note: bytes) -> int:
        """Keep only the end of a log without a writer, behind a note on stderr, and return its size.

        Its lines begin with the number of a stream, as those of a step do.
        """
        part, index = self.read(), _read_index(self.path)
        kept = part.content[part.content.find(b"\n", max(0, len(part.content) - most - 1)) + 1 :]
        content = b"\n2 [%s]\n%s" % (note, kept)  # a reader leaves out the first line, which may have no beginning
        fresh, at_ms = f"{self.path}.new", index[0].at_ms if index else wall_time().ms
        try:
            with _append(fresh) as file:
                file.truncate(0)
                file.write(content)
                inode = os.fstat(file.fileno()).st_ino
            lines = part.next_line - 1 - content.count(b"\n")
            with _append(f"{fresh}.index") as entry:
                entry.truncate(0)
                entry.write(_Entry(at_ms, part.end - len(content), lines, inode).as_line().encode())
            os.replace(f"{fresh}.index", f"{self.path}.index")
            os.replace(fresh, self.path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}.1")
        except OSError:
            return part.end - part.offset
        return len(content)
