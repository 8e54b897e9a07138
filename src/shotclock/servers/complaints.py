"""stderr of a server: said if there is room for it, dropped if not. A client that never reads it must not stop us."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator

# A pipe that can be written to has room for this much.
PIPE_ROOM = 4096


class Complaints(io.TextIOBase):
    """A text stream that never blocks. `dropped` counts the bytes for which there was no room."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self.dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        try:
            while rest and self._poller.poll(0):
                rest = rest[os.write(self._fd, rest[:PIPE_ROOM]) :]
        except OSError:
            pass
        self.dropped += len(rest)
        return len(text)


@contextlib.contextmanager
def unblocking_stderr() -> Iterator[Complaints]:
    """For everything in this process that complains: our own lines, logging, tracebacks, warnings."""
    before = sys.stderr
    sys.stderr = complaints = Complaints(2)
    try:
        yield complaints
    finally:
        sys.stderr = before
