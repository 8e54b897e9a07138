"""Standard streams and descriptors of a server, and how many it has for what.

stderr: ours and its tools'. Written as fast as it is read and no faster, and never without end: neither
a client that does not read it nor one that makes us complain may stop us, and no tool may fill the disk it goes to.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import resource
import select
import sys
from collections.abc import Iterator

from ..process.clock import monotonic_ns
from ..process.command_task import PIPE_ROOM

READ_SIZE = 64 * 1024
# What waits for a client that reads slowly. Of one that does not read, the rest is dropped.
MOST_HELD = 1024 * 1024


class Allowance:
    """So many bytes at once, and so many more each second."""

    def __init__(self, at_once: int, per_second: int) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._left = float(at_once)
        self._at_ns = monotonic_ns()
        self.is_used_up = False
        """From the first that was refused until half of it is there again."""

    def take(self, count: int) -> bool:
        now_ns = monotonic_ns()
        self._left = min(self._at_once, self._left + (now_ns - self._at_ns) * self._per_second / 10**9)
        self._at_ns = now_ns
        if self.is_used_up and self._left < self._at_once / 2:
            return False
        self.is_used_up = count > self._left
        if self.is_used_up:
            return False
        self._left -= count
        return True


class Complaints(io.TextIOBase):
    """A text stream that never blocks. `dropped` counts the bytes that were too many, or had no room.

    Made on a running loop, on which it writes what has no room yet.
    """

    def __init__(self, fd: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._held = bytearray()
        # What clients do wrong is complained about, by us and by what we use. As much again in a quarter of an hour.
        self._ours = Allowance(1024 * 1024, 1024)
        self._tools = Allowance(16 * 1024 * 1024, 16 * 1024)
        self.dropped = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._put_within(self._ours, text.encode("utf-8", "backslashreplace"), "too much was written here")
        return len(text)

    def pass_on(self, content: bytes) -> None:
        """Write what tools have printed."""
        self._put_within(self._tools, content, "tools print too much")

    def say(self, line: str) -> None:
        """Write one of our own lines, which are few: nobody else's can take their place."""
        self._put(f"shotclock: {line}\n".encode("utf-8", "backslashreplace"))

    def _put_within(self, allowance: Allowance, content: bytes, why: str) -> None:
        was_used_up = allowance.is_used_up
        if allowance.take(len(content)):
            self._put(content)
            return
        self.dropped += len(content)
        if not was_used_up:
            self.say(f"{why}: most of it is left out for a while")

    def _put(self, content: bytes) -> None:
        if len(self._held) + len(content) > MOST_HELD:
            self.dropped += len(content)
            return
        is_waiting = bool(self._held)
        self._held += content
        if not is_waiting:
            self._write_held()
            if self._held:
                self._loop.add_writer(self._fd, self._write_more)

    def _write_held(self) -> None:
        written = 0
        try:
            while written < len(self._held) and self._poller.poll(0):
                written += os.write(self._fd, self._held[written : written + PIPE_ROOM])
        except BlockingIOError:
            pass
        except OSError:  # nobody will ever read it
            written = len(self._held)
        del self._held[:written]

    def _write_more(self) -> None:
        self._write_held()
        if not self._held:
            self._loop.remove_writer(self._fd)

    def end(self) -> None:
        """Write what there is room for now; the rest is dropped."""
        if self._held:
            self._loop.remove_writer(self._fd)
            self._write_held()


@contextlib.contextmanager
def unblock_stderr() -> Iterator[Complaints]:
    """Keep stderr from blocking everything in this process that complains: our own lines, logging, tracebacks,
    warnings."""
    before = sys.stderr
    sys.stderr = complaints = Complaints(2)
    try:
        yield complaints
    finally:
        complaints.end()
        sys.stderr = before


@contextlib.contextmanager
def relay_stderr() -> Iterator[Complaints]:
    """Do as `unblock_stderr` does, and relay what processes print that are started meanwhile."""
    try:
        ours = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # somebody closed it
        with unblock_stderr() as complaints:
            yield complaints
        return
    loop, before = asyncio.get_running_loop(), sys.stderr
    printed, theirs = os.pipe()
    os.set_blocking(printed, False)
    os.dup2(theirs, 2)
    os.close(theirs)
    sys.stderr = complaints = Complaints(ours)

    def pass_on() -> bool:
        try:
            content = os.read(printed, READ_SIZE)
        except BlockingIOError:
            return False
        complaints.pass_on(content)
        return bool(content)

    loop.add_reader(printed, pass_on)
    try:
        yield complaints
    finally:
        loop.remove_reader(printed)
        for _ in range(MOST_HELD // READ_SIZE):  # what was printed last
            if not pass_on():
                break
        complaints.end()
        sys.stderr = before
        os.dup2(ours, 2)
        os.close(printed)
        os.close(ours)


@contextlib.contextmanager
def claim_descriptors() -> Iterator[tuple[int, int]]:
    """Move the wire to descriptors that nobody else knows. Meanwhile stdin is empty, and what is printed goes to
    stderr."""
    wire_in, wire_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # somebody closed stderr
            os.dup2(null, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)


# For the store, the host of async commands, logs, and what is accepted or closed in the same moment.
KEPT_FOR_OURSELVES = 64
EACH_WORKER = 4
# Beyond this, memory is what runs out first.
MOST_CONNECTIONS = 16_384


def share_descriptors(most_workers: int) -> tuple[int, int]:
    """Return how many workers and how many connections there may be at once, so that neither takes the other's
    descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return most_workers, MOST_CONNECTIONS
    free = max(16, limit - KEPT_FOR_OURSELVES)
    workers = max(1, min(most_workers, free // 2 // EACH_WORKER))
    return workers, min(MOST_CONNECTIONS, free - workers * EACH_WORKER)
