"""Bounded capture of an output stream: head and tail in memory, the whole in a file up to a cap."""

from __future__ import annotations

import contextlib
import os
from collections import deque

from ..core.records import value
from . import clock

DEFAULT_OUTPUT_LIMIT = 1024 * 1024
# A flood stops being written here; by then nobody will read it all, and a disk must not fill up.
SPILL_CAP = 64 * 1024 * 1024
SPILL_KEPT_SECONDS = 24 * 3600


@value
class Captured:
    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    file: str | None = None
    file_bytes: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.head) + len(self.tail)


class Capture:
    """Keeps at most `limit` bytes in memory: the first half as it came, and the last half seen so far."""

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
        """The first byte that memory cannot keep: from here on the file has everything, from the start."""
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


def state_directory() -> str:
    """Where durable state lives: SHOTCLOCK_HOME, else XDG_STATE_HOME/shotclock, else ~/.local/state/shotclock."""
    if home := os.environ.get("SHOTCLOCK_HOME"):
        return os.path.abspath(home)
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "shotclock")


def make_private_directory(path: str) -> None:
    """With every parent that is ours: makedirs gives its mode to the last one only."""
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
