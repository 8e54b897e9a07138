"""Write to a terminal without waiting for it, and ask the person at it.

Ctrl-S, a window that hangs or a pipe that nobody reads holds no run.
"""

from __future__ import annotations

import os
import select
import sys

from ..core.envelope import Problem
from ..process.output import PIPE_ROOM
from .output import is_terminal, write_quietly

# What a reader may be behind. One that has let so much lie is not going to read it.
BEHIND_LIMIT = 4_000_000
# How long the end waits for a reader that takes nothing at all.
LAST_WORDS_MS = 1_000
# How long we wait for somebody who may have left the terminal.
ANSWER_LIMIT_S = 600.0


class Outlet:
    """A descriptor that takes lines at once and writes what it can."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = bytearray()
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    def write(self, text: str) -> None:
        """Take a text. Raises OSError: it is gone or full, or its reader does not keep up."""
        self._rest += text.encode("utf-8", "replace")
        self._drain(0)
        if len(self._rest) > BEHIND_LIMIT:
            self._rest.clear()
            raise OSError("whoever reads it does not keep up")

    def finish(self) -> bool:
        """Write what is left. Returns whether all of it was taken."""
        try:
            self._drain(LAST_WORDS_MS)
        except OSError:
            return False
        return not self._rest

    def _drain(self, wait_ms: int) -> None:
        """Write for as long as something is taken within `wait_ms`."""
        while self._rest and self._poller.poll(wait_ms):
            try:
                del self._rest[: os.write(self._fd, self._rest[:PIPE_ROOM])]
            except BlockingIOError:
                return
            except OSError:
                self._rest.clear()
                raise


def screen_here() -> Screen | None:
    """Return the terminal to draw on, None where lines are better: stderr is no terminal, cannot move its cursor, or
    shall have no colour."""
    if not is_terminal(sys.stderr) or os.environ.get("TERM", "dumb") in ("dumb", "") or "NO_COLOR" in os.environ:
        return None
    try:
        # A description of our own: without blocking, which on the shared one would be everybody's.
        fd = os.open(os.ttyname(2), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    return Screen(fd)


class Screen:
    """A terminal as a file that takes everything at once and writes what it can."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.encoding = getattr(sys.stderr, "encoding", None) or "utf-8"

    @property
    def is_behind(self) -> bool:
        self.flush()
        return bool(self._rest)

    def write(self, text: str) -> int:
        self._rest += text.encode(self.encoding, "replace")
        return len(text)

    def flush(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; nobody looks any more
            self._rest = b""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """What is left of a frame still belongs before whatever is said next. Waits as long as any line would."""
        self.flush()
        rest, self._rest = self._rest, b""
        os.close(self._fd)
        if rest:
            write_quietly(sys.stderr, rest.decode(self.encoding, "replace"))


def confirm(name: str, expected: str) -> Problem | None:
    """Have a person type back what is expected. Returns None where they did, otherwise why nothing runs."""
    if not is_terminal(sys.stdin) or not is_terminal(sys.stderr):
        message = f"{name} runs only after a person has typed {expected!r} at a terminal"
        return Problem("PERSON_REQUIRED", message, "validation", context={"expected": expected})
    write_quietly(sys.stderr, f"{name} needs a person to confirm. Type {expected!r} to go on: ")
    if not select.select([sys.stdin], [], [], ANSWER_LIMIT_S)[0]:
        return Problem("PERSON_REQUIRED", f"{name}: nobody answered", "validation")
    if sys.stdin.readline().rstrip("\n") == expected:
        return None
    return Problem("PERSON_REQUIRED", f"{name} was not confirmed", "validation")
