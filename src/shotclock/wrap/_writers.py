"""Streams that never block: lines to the client and to the server, and our stderr."""

from __future__ import annotations

import os
import select
import stat

from ..core.limits import NS_PER_MS
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import PIPE_ROOM
from ._lines import READ_SIZE

# A reader that is this far behind stops the other side, as a pipe would.
MOST_UNWRITTEN = 256 * 1024


def read_some(fd: int) -> bytes | None:
    """Read once from a descriptor. None: there is nothing yet; empty: the stream has ended."""
    if fd < 0:
        return None
    try:
        return os.read(fd, READ_SIZE)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class LineWriter:
    def __init__(self, fd: int, *, shared: bool = False) -> None:
        self.fd = fd
        self.is_broken: bool = False
        self._unwritten = bytearray()
        mode = os.fstat(fd).st_mode
        # Other programs may share a terminal or a file, and their flags are not ours to change.
        self._has_own_flags = not shared and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
        if self._has_own_flags:
            os.set_blocking(fd, False)

    @property
    def is_full(self) -> bool:
        return len(self._unwritten) >= MOST_UNWRITTEN

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def write_line(self, line: bytes) -> bool:
        """Write a line, now or later. Return False if its reader is gone."""
        if self.is_broken:
            return False
        if self._unwritten or not self._has_own_flags:
            self._unwritten += line
            return True
        written = self._write_some(line)
        if written < len(line):
            self._unwritten += memoryview(line)[written:]
        return not self.is_broken

    def flush(self) -> None:
        """Write as much as the reader takes. Called when the descriptor is ready."""
        if self._unwritten:
            most = len(self._unwritten) if self._has_own_flags else PIPE_ROOM
            with memoryview(self._unwritten) as rest, rest[:most] as piece:
                written = self._write_some(piece)
            del self._unwritten[:written]

    def _write_some(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader is gone
            self.is_broken = True
            return len(data)

    def flush_ready(self, within_ms: int = 0) -> None:
        """Write as much as the reader takes in this time."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        give_up_ns = monotonic_ns() + within_ms * NS_PER_MS
        while self.has_unwritten and not self.is_broken:
            if not poller.poll(max(0, (give_up_ns - monotonic_ns()) // NS_PER_MS)):
                break
            before = len(self._unwritten)
            self.flush()
            if len(self._unwritten) == before:
                break

    def finish(self, within_ms: int) -> None:
        """Write the rest, as far as the reader takes it in time, and leave the descriptor as it was."""
        self.flush_ready(within_ms)
        if self._has_own_flags:
            os.set_blocking(self.fd, True)


class NoteWriter(LineWriter):
    """Our stderr. A reader that does not read loses text instead of stopping the server."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, shared=True)
        self._dropped = 0

    def note(self, text: str) -> None:
        """Write a line of ours. Names of tools must neither end it nor hide a part of it."""
        if not text.isprintable():
            marked = (mark if mark.isprintable() or mark == "\t" else f"<U+{ord(mark):04X}>" for mark in text)
            text = "".join(marked)
        self.write(text.encode("utf-8", "replace") + b"\n")

    def write(self, text: bytes) -> None:
        if self._dropped and not self.has_unwritten:
            note = f"\nshotclock: {self._dropped} bytes are left out here, because stderr was not read\n"
            self.write_line(note.encode())
            self._dropped = 0
        room = max(0, MOST_UNWRITTEN - len(self._unwritten))
        self._dropped += max(0, len(text) - room)
        self.write_line(text[:room])
        self.flush_ready()
