"""stderr of a server: said if there is room for it, dropped if not. A client that never reads it must not stop us."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator

from ..enforce.clock import monotonic_ns

# A pipe that can be written to has room for this much.
PIPE_ROOM = 4096
# What clients do wrong is complained about, by us and by what we use; whoever does it again and again must not fill the
# disk that stderr goes to. So many bytes at once, and as many again in a quarter of an hour.
MOST_AT_ONCE = 1024 * 1024
BYTES_PER_S = 1024


class Complaints(io.TextIOBase):
    """A text stream that never blocks. `dropped` counts the bytes that were too many, or had no room."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._left = float(MOST_AT_ONCE)
        self._written_at_ns = monotonic_ns()
        self._is_full = False
        self.dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        content = text.encode("utf-8", "backslashreplace")
        now_ns = monotonic_ns()
        self._left = min(MOST_AT_ONCE, self._left + (now_ns - self._written_at_ns) * BYTES_PER_S / 10**9)
        self._written_at_ns = now_ns
        if len(content) <= self._left:
            self._left -= len(content)
            self._is_full = self._is_full and self._left < MOST_AT_ONCE / 2
            self._put(content)
            return len(text)
        self.dropped += len(content)
        if not self._is_full:
            self._is_full = True
            self.say("too much was written here: most of it is left out for a while")
        return len(text)

    def say(self, line: str) -> None:
        """Write one of our own lines, which are few: nobody else's can take their place."""
        self._put(f"shotclock: {line}\n".encode("utf-8", "backslashreplace"))

    def _put(self, content: bytes) -> None:
        rest = memoryview(content)
        try:
            while rest and self._poller.poll(0):
                rest = rest[os.write(self._fd, rest[:PIPE_ROOM]) :]
        except OSError:
            pass
        self.dropped += len(rest)


@contextlib.contextmanager
def unblocking_stderr() -> Iterator[Complaints]:
    """For everything in this process that complains: our own lines, logging, tracebacks, warnings."""
    before = sys.stderr
    sys.stderr = complaints = Complaints(2)
    try:
        yield complaints
    finally:
        sys.stderr = before
