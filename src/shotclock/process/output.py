"""Output of the work: a pipe that is read as it comes, and captured within bounds or passed on without waiting for its
reader.

docs/design.md: R16.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections import deque

from ..core.records import value
from . import clock

DEFAULT_OUTPUT_LIMIT = 1024 * 1024
# A flood stops being written here; by then nobody will read it all, and a disk must not fill up.
SPILL_CAP = 64 * 1024 * 1024
SPILL_KEPT_SECONDS = 24 * 3600
READ_SIZE = 256 * 1024
# POLLOUT promises room for this much in a pipe, so a write of it cannot block, and no flag of a
# descriptor that others may share has to be changed.
PIPE_ROOM = 4096
RELAY_HELD = 64 * 1024


@value
class Captured:
    """Output that was captured: head and tail, and the file that has the whole."""

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    file: str | None = None
    file_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)


class Capture:
    """Bounded capture of a stream. Keeps at most `limit` bytes in memory, the first half as it came and the last half
    seen so far; the whole in a file up to a cap."""

    def __init__(self, limit: int, spill_to: str | None) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._total = 0
        self._spill_to = spill_to
        self._spill_fd = -1
        self._spilled = 0

    def add(self, chunk: bytes) -> None:
        self._total += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk:
            return
        self._tail.append(chunk)
        self._tail_size += len(chunk)
        if self._spill_fd >= 0:
            self._spill(chunk)
        elif self._tail_size > self._tail_limit:
            self._open_spill()
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())

    def finish(self) -> Captured:
        tail = b"".join(self._tail)
        if len(tail) > self._tail_limit:
            tail = tail[len(tail) - self._tail_limit :]
        if self._spill_fd >= 0:
            os.close(self._spill_fd)
            self._spill_fd = -1
            return Captured(bytes(self._head), tail, self._total, self._spill_to, self._spilled)
        return Captured(bytes(self._head), tail, self._total)

    def _open_spill(self) -> None:
        """Open the file at the first byte that memory cannot keep: from here on it has everything, from the start."""
        if self._spill_to is None:
            return
        try:
            make_private_directory(os.path.dirname(self._spill_to))
            prune_spills()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._spill_fd = os.open(self._spill_to, flags, 0o600)
        except OSError:
            self._spill_to = None  # nowhere to write: head and tail are what is kept, and `truncated` says so
            return
        self._spill(bytes(self._head))
        for chunk in self._tail:
            self._spill(chunk)

    def _spill(self, chunk: bytes) -> None:
        chunk = chunk[: SPILL_CAP - self._spilled]
        try:
            while chunk:
                written = os.write(self._spill_fd, chunk)
                self._spilled += written
                chunk = chunk[written:]
        except OSError:
            pass  # disk full: the file ends here, its size is reported


class Stream:
    """One output pipe of the work."""

    def __init__(self, fd: int, capture: Capture | None, relay_to: int) -> None:
        self.fd = fd
        self.capture = capture
        self.relay_to = relay_to
        self.held = bytearray()
        self.trouble = 0
        """Why what was relayed could not be written on: an errno. That a reader left is none."""
        os.set_blocking(fd, False)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    @property
    def busy(self) -> bool:
        return self.open or bool(self.held)

    def read(self) -> bool:
        """Take what is there. Return True if there was anything."""
        try:
            chunk = os.read(self.fd, READ_SIZE if self.capture else RELAY_HELD)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return False
        if self.capture is not None:
            self.capture.add(chunk)
        else:
            self.held += chunk
        return True

    def write(self) -> None:
        if not _takes_more(self.relay_to):  # both streams may be the same pipe, and the other was faster
            return
        try:
            written = os.write(self.relay_to, self.held[:PIPE_ROOM])
        except OSError as error:  # nobody reads any more: let the work find out the way it would without us
            self.trouble = 0 if error.errno == errno.EPIPE else error.errno or errno.EIO
            self.held.clear()
            self.close()
            return
        del self.held[:written]

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _takes_more(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


def state_directory() -> str:
    """Return where durable state lives: SHOTCLOCK_HOME, else XDG_STATE_HOME/shotclock, else
    ~/.local/state/shotclock."""
    if home := os.environ.get("SHOTCLOCK_HOME"):
        return os.path.abspath(home)
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "shotclock")


def make_private_directory(path: str) -> None:
    """Make a directory with every parent that is ours: makedirs gives its mode to the last one only."""
    home = state_directory()
    os.makedirs(os.path.dirname(home), exist_ok=True)
    for folder in (home, path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def spill_path(name: str) -> str:
    return os.path.join(state_directory(), "output", name)


def prune_spills() -> None:
    """Remove output files nobody came for in a day. Cheap: one listing, only done when a new one is written."""
    folder = os.path.join(state_directory(), "output")
    oldest = clock.wall_seconds() - SPILL_KEPT_SECONDS
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.stat(follow_symlinks=False).st_mtime < oldest:
                os.unlink(entry.path)
        except OSError:
            continue
