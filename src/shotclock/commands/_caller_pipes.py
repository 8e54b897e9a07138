"""The standard streams of a command whose caller reads and writes its pipes itself, as `subprocess` does."""

from __future__ import annotations

import contextlib
import os
import select
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

from ..supervise.supervisor import LARGEST_PIPE

READ_SIZE = 64 * 1024
# Of the rest in a pipe, which has at most this many pages: a process outside the tree may fill it again and again.
MOST_READS = LARGEST_PIPE // 4096


class CallerPipes:
    """The descriptors of the command, and our ends of its pipes."""

    def __init__(self, stdin: Any, stdout: Any, stderr: Any, input: memoryview) -> None:
        _refuse_closed_descriptors()
        self._opened: set[int] = set()
        self._rest = input
        self._outputs: list[int] = []
        self._captured: dict[int, list[bytes]] = {}
        self.input_fd: int = -1
        try:
            theirs, ours = self._join(stdin, 0)
            self.handed: list[int] = [theirs]
            self.input_fd = ours
            for number, given in ((1, stdout), (2, stderr)):
                if given == STDOUT and number == 2:  # the supervisor gives it the same descriptor
                    self._outputs.append(-1)
                    continue
                theirs, ours = self._join(given, number)
                self.handed.append(theirs)
                self._outputs.append(ours)
                if ours >= 0:
                    self._captured[ours] = []
        except BaseException:
            self.close()
            raise

    def _join(self, given: Any, number: int) -> tuple[int, int]:
        """Return the descriptor for the command, and our end if it is a pipe."""
        if given == PIPE:
            ends = os.pipe()
            self._opened.update(ends)
            ours = ends[1 if number == 0 else 0]
            os.set_blocking(ours, False)
            return ends[0 if number == 0 else 1], ours
        if given == STDOUT:
            raise ValueError("STDOUT can only be used for stderr")
        if given == DEVNULL:
            null = os.open(os.devnull, os.O_RDWR)
            self._opened.add(null)
            return null, -1
        fd = number if given is None else given if isinstance(given, int) else given.fileno()
        os.fstat(fd)  # raises if it is none
        return fd, -1

    @property
    def open_ends(self) -> list[tuple[int, int]]:
        """Return our ends, with what to wait for."""
        inputs = [(self.input_fd, select.POLLOUT)] if self.input_fd >= 0 else []
        return [*inputs, *((fd, select.POLLIN) for fd in self._captured)]

    def close_theirs(self) -> None:
        for fd in self._opened.intersection(self.handed):
            self._close(fd)
        if self.input_fd >= 0 and not self._rest:
            self._close_input()

    def move(self, fd: int) -> bool:
        """Read or write once. Return False if that was the last time."""
        if fd == self.input_fd:
            try:
                self._rest = self._rest[os.write(fd, self._rest[:READ_SIZE]) :]
            except BlockingIOError:
                return True
            except BrokenPipeError:
                self._rest = self._rest[:0]
            if not self._rest:
                self._close_input()
            return bool(self._rest)
        try:
            chunk = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return True
        self._captured[fd].append(chunk)
        return bool(chunk)

    def finish(self) -> list[bytes | None]:
        """Read the rest and return the output. A process that is none of the command's may still hold a pipe."""
        for fd, chunks in self._captured.items():
            with contextlib.suppress(BlockingIOError):
                for _ in range(MOST_READS):
                    if chunks[-1:] == [b""]:
                        break
                    chunks.append(os.read(fd, READ_SIZE))
        return [b"".join(self._captured[fd]) if fd >= 0 else None for fd in self._outputs]

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())

    def _close_input(self) -> None:
        self._close(self.input_fd)
        self.input_fd = -1

    def _close(self, fd: int) -> None:
        self._opened.remove(fd)
        os.close(fd)


def _refuse_closed_descriptors() -> None:
    """Refuse to run where the next file that is opened would become stdout or stderr. A closed stdin becomes empty."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError as error:
            if number == 0:
                if (null := os.open(os.devnull, os.O_RDONLY)) != 0:  # another thread was faster
                    os.close(null)
                continue
            raise ValueError(f"descriptor {number} is closed: open it first, for example {os.devnull}") from error
