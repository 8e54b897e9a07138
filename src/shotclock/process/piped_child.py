"""A child process of ours with pipes to all three of its streams.

It ends by itself when its stdin closes, and so also when this process dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence

from ..core.clocks import NS_PER_MS
from .clock import monotonic_ns

READ_SIZE = 64 * 1024
# How often a blocked writer looks whether the child is being ended.
LOOK_MS = 500


class PipedChild:
    """A child with pipes. One thread reads; writes may come from others, one at a time."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, *, has_own_group: bool = False
    ) -> None:
        """Start it. In a group of its own, the signals of a terminal do not reach it. Raises OSError."""
        pipe = subprocess.PIPE
        group = 0 if has_own_group else None
        self._process = subprocess.Popen(
            list(argv), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=env, process_group=group
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin = self._process.stdin
        self.stdin_fd: int = self._stdin.fileno()
        self.stdout_fd: int = self._process.stdout.fileno()
        self.stderr_fd: int = self._process.stderr.fileno()
        self.is_ending = False
        for fd in (self._stdin.fileno(), self.stdout_fd, self.stderr_fd):
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes, within_ms: int) -> bool:
        """Write everything. Return False if the child is gone, is being ended, or does not read in time."""
        give_up_ns = monotonic_ns() + within_ms * NS_PER_MS
        view = memoryview(data)
        poller = select.poll()
        try:
            poller.register(self._stdin.fileno(), select.POLLOUT)
            while view:
                if self.is_ending or monotonic_ns() >= give_up_ns:
                    return False
                if poller.poll(LOOK_MS):
                    with contextlib.suppress(BlockingIOError):
                        view = view[os.write(self._stdin.fileno(), view) :]
        except (OSError, ValueError):  # its end of the pipe, or ours, is closed
            return False
        return True

    def close_stdin(self) -> None:
        """End the input. No other thread may write meanwhile."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def wait(self, within_s: float) -> int | None:
        """Return the exit code, negative for a signal; None if it is still running."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Close the pipes to a child that has ended."""
        self.close_stdin()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
