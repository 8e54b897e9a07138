"""An editor at the person's own terminal: it stays in our session and process group, so that the terminal is its own.

A supervisor would take the terminal from it (`/dev/tty`, the size of the window, Ctrl-Z). So we are the one who guards
it: it is stopped when its time is up, when we are told to stop, and by the kernel when we are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from types import FrameType

from ..core.deadlines import NS_PER_MS
from ..core.records import dataclass
from . import kernel
from .clock import monotonic_ns
from .kill import kill_below
from .supervisor import LONGEST_WAIT_MS

# Between SIGTERM and SIGKILL: time for an editor to put what was not saved somewhere.
GRACE_MS = 2_000
# An exit code that shells use for a command that is not there; nothing was edited then.
_NOT_THERE = 127
_ASKS_TO_STOP = (signal.SIGTERM, signal.SIGHUP)
# The terminal sends these to all of its foreground, and they are the editor's to understand: Emacs uses one for Ctrl-G.
_EDITORS_OWN = (signal.SIGINT, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Edited:
    """How an editor ended."""

    status: int | None
    """Its exit code, or minus its signal."""
    why_not: OSError | None = None
    """Why it could not be started."""
    overdue: bool = False
    signal: str | None = None
    """What told us to stop it."""

    @property
    def is_well(self) -> bool:
        return self.status == 0 and not self.overdue and self.signal is None


def edit(argv: Sequence[str], *, until_ns: int) -> Edited:
    """Run an editor to its end, or to ours. Not for programs with threads or other children. Nothing survives this
    call."""
    kernel.become_subreaper()
    heard: list[int] = []
    wake, wake_in = os.pipe()
    errors, errors_in = os.pipe()
    for fd in (wake, wake_in):
        os.set_blocking(fd, False)

    def hear(number: int, frame: FrameType | None) -> None:
        if number in _ASKS_TO_STOP:
            heard.append(number)

    listened_to = (*_ASKS_TO_STOP, *_EDITORS_OWN, signal.SIGCHLD)
    previous = {number: signal.signal(number, hear) for number in listened_to}
    previous_fd = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    me = os.getpid()
    try:
        try:
            pid = os.fork()
        except OSError as error:
            return Edited(None, error)
        if pid == 0:
            _become(argv, me, errors_in)
        os.close(errors_in)
        errors_in = -1
        edited = _await_end(pid, wake, heard, until_ns)
        # Closed by exec, or with the reason why there was none. Whoever has ended has let go of it.
        told = os.read(errors, 16) if edited.status == _NOT_THERE else b""
        return Edited(None, OSError(int(told), os.strerror(int(told)))) if told else edited
    finally:
        kill_below(kernel.collect_dead, lambda wait_ms: _pause(wake, wait_ms))
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for fd in (wake, wake_in, errors, errors_in):
            if fd >= 0:
                os.close(fd)


def _become(argv: Sequence[str], parent: int, errors_in: int) -> None:
    """Become the editor, in the child up to the exec."""
    try:
        kernel.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*_ASKS_TO_STOP, *_EDITORS_OWN, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], list(argv))
    except OSError as error:
        os.write(errors_in, str(error.errno or 0).encode())
    finally:
        os._exit(_NOT_THERE)


def _await_end(pid: int, wake: int, heard: list[int], until_ns: int) -> Edited:
    kill_ns: int | None = None
    overdue = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        now_ns = monotonic_ns()
        if ended or (kill_ns is not None and now_ns >= kill_ns):
            stopped_by = signal.Signals(heard[0]).name if heard else None
            return Edited(os.waitstatus_to_exitcode(status) if ended else None, None, overdue, stopped_by)
        if kill_ns is None and (heard or now_ns >= until_ns):
            overdue = not heard
            kill_ns = now_ns + GRACE_MS * NS_PER_MS
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        _pause(wake, min(LONGEST_WAIT_MS, -(-((kill_ns or until_ns) - now_ns) // NS_PER_MS)))


def _pause(wake: int, wait_ms: int) -> None:
    """Wait, or until a child has ended, or a signal came."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.poll(max(0, wait_ms))
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
