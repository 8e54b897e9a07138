"""Standard streams and descriptors of a server.

Nothing here blocks or grows without limit: neither a client that does not read stderr nor a tool that prints without
end can stop the server or fill its memory.
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
from collections.abc import Callable, Iterator

from ...supervise.clock import TokenBucket
from ...supervise.command_task import PIPE_ROOM

READ_SIZE = 64 * 1024
MOST_HELD = 1024 * 1024  # bytes of stderr that wait for a slow client. More are dropped


class PipeWriter:
    """A descriptor that is written without blocking. Bytes without room wait in memory."""

    def __init__(self, fd: int, on_drained: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)
        self._held = bytearray()
        self._waits = False
        self._on_drained = on_drained
        self.is_broken: bool = False  # the other side has closed it. Further bytes are dropped

    @property
    def held(self) -> int:
        return len(self._held)

    def write(self, content: bytes) -> None:
        self._held += content
        if not self._waits:
            self._flush()

    def close(self) -> None:
        """Write what there is room for, and drop the rest."""
        if self._waits:
            self._flush()
            self._held.clear()
            self._wait(False)

    def _flush(self) -> None:
        written = 0
        try:
            while written < len(self._held) and self._poller.poll(0):
                written += os.write(self._fd, self._held[written : written + PIPE_ROOM])
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
            written = len(self._held)
        del self._held[:written]
        was_waiting = self._waits
        self._wait(bool(self._held))
        if self._on_drained is not None and not self._held and (was_waiting or self.is_broken):
            self._on_drained()

    def _wait(self, waits: bool) -> None:
        if waits and not self._waits:
            self._loop.add_writer(self._fd, self._flush)
        elif self._waits and not waits:
            self._loop.remove_writer(self._fd)
        self._waits = waits


class ServerStderr(io.TextIOBase):
    """The stderr of a server, which never blocks. `dropped` counts the bytes left out."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._writer = PipeWriter(fd)
        # Lines about mistakes of clients, from the server and its libraries; refilled in a quarter of an hour.
        self._own = TokenBucket(1024 * 1024, 1024)
        self._tools = TokenBucket(16 * 1024 * 1024, 16 * 1024)
        self._used_up: set[TokenBucket] = set()  # from the first refusal until half of the allowance is back
        self.dropped: int = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._write_within(self._own, text.encode("utf-8", "backslashreplace"), "too much was written here")
        return len(text)

    def relay(self, content: bytes) -> None:
        self._write_within(self._tools, content, "tools print too much")

    def say(self, line: str) -> None:
        """Write a line of the server itself. These are few, and not counted."""
        self._write(f"shotclock: {line}\n".encode("utf-8", "backslashreplace"))

    def _write_within(self, allowance: TokenBucket, content: bytes, why: str) -> None:
        if allowance in self._used_up and allowance.left >= allowance.at_once / 2:
            self._used_up.remove(allowance)
        if allowance not in self._used_up:
            if not allowance.take(len(content)):
                self._write(content)
                return
            self._used_up.add(allowance)
            self.say(f"{why}: most of it is left out for a while")
        self.dropped += len(content)

    def _write(self, content: bytes) -> None:
        if self._writer.held + len(content) > MOST_HELD:
            self.dropped += len(content)
        else:
            self._writer.write(content)

    def end(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def unblock_stderr(fd: int = 2) -> Iterator[ServerStderr]:
    """Replace sys.stderr, so that no log line, traceback or warning can block this process."""
    before = sys.stderr
    sys.stderr = stderr = ServerStderr(fd)
    try:
        yield stderr
    finally:
        stderr.end()
        sys.stderr = before


@contextlib.contextmanager
def relay_stderr() -> Iterator[ServerStderr]:
    """Do as `unblock_stderr`, and relay the stderr of processes started meanwhile."""
    try:
        own = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:  # stderr is closed
        with unblock_stderr() as stderr:
            yield stderr
        return
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.dup2(write_end, 2)
    os.close(write_end)
    try:
        with unblock_stderr(own) as stderr:

            def relay() -> bool:
                try:
                    content = os.read(read_end, READ_SIZE)
                except BlockingIOError:
                    return False
                stderr.relay(content)
                return bool(content)

            loop.add_reader(read_end, relay)
            try:
                yield stderr
            finally:
                loop.remove_reader(read_end)
                for _ in range(MOST_HELD // READ_SIZE):
                    if not relay():
                        break
    finally:
        os.dup2(own, 2)
        os.close(read_end)
        os.close(own)


@contextlib.contextmanager
def claim_descriptors() -> Iterator[tuple[int, int]]:
    """Move stdin and stdout to private descriptors. Meanwhile stdin is empty and stdout is stderr."""
    wire_in, wire_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, 0)
        try:
            os.dup2(2, 1)
        except OSError:  # stderr is closed
            os.dup2(null, 1)
        yield wire_in, wire_out
    finally:
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        for fd in (wire_in, wire_out, null):
            os.close(fd)


# For the store, the host of async commands, logs, and connections that are accepted or closed in the same moment.
KEPT_FOR_SERVER = 64
EACH_WORKER = 4
MOST_CONNECTIONS = 16_384  # beyond this, memory is used up first


def share_descriptors(most_workers: int) -> tuple[int, int]:
    """Return the numbers of workers and connections that can be open together."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return most_workers, MOST_CONNECTIONS
    free = max(16, limit - KEPT_FOR_SERVER)
    workers = max(1, min(most_workers, free // 2 // EACH_WORKER))
    return workers, min(MOST_CONNECTIONS, free - workers * EACH_WORKER)
