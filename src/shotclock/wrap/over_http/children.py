"""Children of the HTTP front: each is a `shotclock wrap` over pipes, with its own server, limits and policy."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ...core.clocks import NS_PER_MS
from ...process.clock import monotonic_ns
from ...process.piped_child import READ_SIZE, PipedChild
from ..lines import LinePart, LineSplitter
from ..messages import RpcMessage
from ..writers import NoteWriter
from .outbox import Parcel

# A child does not read while its server is starting. Only a server that reads nothing exhausts this.
WRITTEN_WITHIN_MS = 180_000
LOOK_MS = 1_000
# Beyond the limits of the child itself, which ends its server first.
END_MARGIN_MS = 5_000
KEPT_STDERR = 2 * 1024


class Receiver(Protocol):
    """The session of a child. Both methods are called on the thread of the child."""

    def take(self, parcel: Parcel, message: RpcMessage) -> None: ...

    def child_ended(self, code: int, stderr: str) -> None: ...


class Notes:
    """Our stderr, for all threads."""

    def __init__(self) -> None:
        self._writer = NoteWriter(2)
        self._lock = threading.Lock()

    def write(self, text: bytes) -> None:
        with self._lock:
            self._writer.write(text)

    def say(self, text: str) -> None:
        self.write(f"shotclock: {text}\n".encode("utf-8", "replace"))


class WrapChild:
    """A child and the thread that reads it. Raises OSError if it cannot be started."""

    def __init__(
        self,
        argv: Sequence[str],
        receiver: Receiver,
        notes: Notes,
        end_within_ms: int,
        on_gone: Callable[[WrapChild], None],
    ) -> None:
        self._receiver = receiver
        self._notes = notes
        self._end_within_ms = end_within_ms + END_MARGIN_MS
        self._on_gone = on_gone
        self._kill_at_ns: int | None = None
        self._stderr = b""
        self._long: Parcel | None = None
        self._writing = threading.Lock()
        self._child = PipedChild(argv)
        self._thread = threading.Thread(target=self._read, daemon=True, name=f"child {self._child.pid}")

    def start_reading(self) -> None:
        self._thread.start()

    def send(self, line: bytes) -> bool:
        """Write a message as one line. Return False if the child is gone, or does not read."""
        with self._writing:
            is_written = all(self._child.write(each, WRITTEN_WITHIN_MS) for each in (line, b"\n"))
        if not is_written:
            self.stop()  # the rest of a line that was begun can never follow
        return is_written

    def interrupt(self) -> None:
        """Make writers give up, and begin the time in which the child has to end."""
        if self._kill_at_ns is None:
            self._kill_at_ns = monotonic_ns() + self._end_within_ms * NS_PER_MS
        self._child.is_ending = True

    def stop(self, signal_number: int | None = None) -> None:
        """Ask the child to end, by a signal or by the end of its input. It is killed when its limits are over."""
        self.interrupt()
        if signal_number is not None:
            self._child.send_signal(signal_number)
        with self._writing:  # a blocked writer sees `is_ending` and gives up
            self._child.close_stdin()

    def kill(self) -> None:
        self._child.kill()

    def _read(self) -> None:
        try:
            self._read_messages()
        except OSError as error:  # the disk is full
            self._notes.say(f"a message could not be kept, so its session ends: {error.strerror or error}")
            self._child.kill()
        code = None
        while code is None:
            code = self._child.wait(LOOK_MS / 1000)
            self._kill_if_late()
        while chunk := _read_some(self._child.stderr_fd):
            self._keep_stderr(chunk)
        self._child.is_ending = True
        with self._writing:
            self._child.close()
        self._receiver.child_ended(code, self._stderr.decode("utf-8", "replace").strip())
        self._on_gone(self)

    def _read_messages(self) -> None:
        """Read until the end of stdout. Raises OSError."""
        splitter = LineSplitter()
        poller = select.poll()
        unread = {self._child.stdout_fd, self._child.stderr_fd}
        for fd in unread:
            poller.register(fd, select.POLLIN)
        while self._child.stdout_fd in unread:
            for fd, _ in poller.poll(LOOK_MS):
                if not (chunk := _read_some(fd)):
                    poller.unregister(fd)
                    unread.discard(fd)
                elif fd == self._child.stderr_fd:
                    self._keep_stderr(chunk)
                else:
                    for part, piece in splitter.split(chunk):
                        self._take(part, piece)
            self._kill_if_late()

    def _take(self, part: LinePart, piece: bytes) -> None:
        """Take a line, or a piece of a long one."""
        if part is LinePart.WHOLE:
            self._pass(Parcel(piece.rstrip()))
        elif part is LinePart.START:
            self._long = Parcel(piece, is_long=True)
        elif self._long is not None and part is LinePart.MIDDLE:
            self._long.add(piece)
        elif self._long is not None:
            self._long.finish(piece.rstrip())
            self._pass(self._long)
            self._long = None

    def _pass(self, parcel: Parcel) -> None:
        message, parcel.message = parcel.message, None  # only the bytes are kept while they wait
        if message is None or not (message.is_answer or message.method is not None):
            parcel.close()
        else:
            self._receiver.take(parcel, message)

    def _keep_stderr(self, chunk: bytes) -> None:
        self._stderr = (self._stderr + chunk)[-KEPT_STDERR:]
        self._notes.write(chunk)

    def _kill_if_late(self) -> None:
        if self._kill_at_ns is not None and monotonic_ns() >= self._kill_at_ns:
            self._child.kill()


def _read_some(fd: int) -> bytes:
    """Read once; nothing at the end, and where nothing is ready."""
    try:
        return os.read(fd, READ_SIZE)
    except OSError:
        return b""
