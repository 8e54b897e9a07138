"""A terminal that is drawn on and never waited for: Ctrl-S, or a window that hangs, holds nobody."""

from __future__ import annotations

import os
import sys

from .output import is_terminal, write_quietly


def screen_here() -> Screen | None:
    """None where lines are better: stderr is no terminal, cannot move its cursor, or shall have no colour."""
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
