"""Programs without a supervisor: those that outlive this process (one of ours, a browser, a shared server), and an
editor.

An editor stays in our session and process group, so that it has the terminal (`/dev/tty`, the size of the window,
Ctrl-Z), which a supervisor would take from it. So this process guards it: the editor is stopped when its time is up,
when this process receives a stop signal, and by the kernel when this process is killed.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from ..core.clocks import NS_PER_MS
from ..core.value_types import value
from . import kernel
from .clock import monotonic_ns, pause
from .environment import CALL_VARIABLE, DEADLINE_VARIABLE, REMAINING_VARIABLE
from .kill import kill_below
from .supervisor import LONGEST_WAIT_MS

# How long the program may take to detach: the start of an interpreter, and a fork.
LEAVE_LIMIT_S = 10.0
LEAVE_PAUSE_S = 0.002


def read_error_output(argv: Sequence[str], limit_s: float) -> str:
    """Run a program that changes nothing. Return its error output if it fails within the limit."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
    try:
        ran = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return ran.stderr.decode("utf-8", "replace") if ran.returncode else ""


def start_detached(module: str, arguments: list[str], *, output_fd: int, environment: Mapping[str, str]) -> None:
    """Run `module.main(*arguments)` in a process that survives this one and its callers. Its own limits bound it.

    It reads nothing and writes to `output_fd`. Raises OSError if it cannot be started.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    # The first process is our child and ends at once, so that the second needs no parent to wait for it.
    code = (
        "import os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "os.closerange(3, 4096)\n"
        f"sys.path.append({root!r})\n"
        f"from {module} import main\n"
        "main(*sys.argv[1:])\n"
    )
    # The deadline and the call of the caller do not apply to this work.
    callers = (REMAINING_VARIABLE, DEADLINE_VARIABLE, CALL_VARIABLE)
    kept = {name: value for name, value in environment.items() if name not in callers}
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        pid = contextvars.Context().run(  # it belongs to no call
            os.posix_spawn,
            sys.executable,
            [sys.executable, "-P", "-c", code, *arguments],
            kept,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, output_fd, 1),
                (os.POSIX_SPAWN_DUP2, output_fd, 2),
            ],
            setsid=True,
            setsigmask=[],
        )
    finally:
        os.close(null)
    for _ in range(int(LEAVE_LIMIT_S / LEAVE_PAUSE_S)):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return
        pause(LEAVE_PAUSE_S)
    raise TimeoutError("the detached process did not come up in time")


def open_in_browser(path: str, environment: Mapping[str, str]) -> bool:
    """Open a page in the person's own browser, which outlives us. Return whether a program was found for it; whether a
    window appeared is unknown."""
    command = _find_opener(environment)
    if command is None:
        return False
    try:
        start_program([command, path], environment)
    except OSError:
        return False
    return True


def start_program(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a program by its path. It survives this process and its callers, and its output is discarded. Raises
    OSError."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        start_detached(__name__, list(argv), output_fd=null, environment=environment)
    finally:
        os.close(null)


def main(*argv: str) -> None:
    os.execv(argv[0], argv)


def _find_opener(environment: Mapping[str, str]) -> str | None:
    """Find the program that opens a page: that of BROWSER, which editors with a remote connection set, or xdg-open.

    Without a display xdg-open would start a browser in our terminal, so it is not used then.
    """
    search = environment.get("PATH")
    if sys.platform == "darwin":
        return shutil.which("open", path=search)
    names = environment.get("BROWSER", "").split(os.pathsep)
    named = next((found for name in names if name and (found := shutil.which(name, path=search))), None)
    if named is None and not environment.get("DISPLAY") and not environment.get("WAYLAND_DISPLAY"):
        return None
    return named or shutil.which("xdg-open", path=search)


# --- an editor at the person's terminal --------------------------------------------------------------------

# Between SIGTERM and SIGKILL: time for an editor to save its buffers.
GRACE_MS = 2_000
# The exit code of a command that was not found; nothing was edited then.
_NOT_THERE = 127
_STOPS_EDITOR = (signal.SIGTERM, signal.SIGHUP)
# The terminal sends these to its whole foreground, and the editor handles them: Emacs uses one for Ctrl-G.
_EDITORS_OWN = (signal.SIGINT, signal.SIGQUIT)


@value
class Edited:
    """The end of an editor."""

    status: int | None
    """Its exit code, or minus its signal."""
    why_not: OSError | None = None
    """The error of the start."""
    overdue: bool = False
    signal: str | None = None
    """The signal that stopped it."""

    @property
    def is_well(self) -> bool:
        return self.status == 0 and not self.overdue and self.signal is None


def edit(argv: Sequence[str], *, until_ns: int) -> Edited:
    """Run an editor to its end, or until this process is to stop. Nothing of it survives this call.

    Not for programs with threads or other children.
    """
    kernel.become_subreaper()
    heard: list[int] = []
    wake, wake_in = os.pipe()
    errors, errors_in = os.pipe()
    for fd in (wake, wake_in):
        os.set_blocking(fd, False)

    def hear(number: int, frame: FrameType | None) -> None:
        if number in _STOPS_EDITOR:
            heard.append(number)

    listened_to = (*_STOPS_EDITOR, *_EDITORS_OWN, signal.SIGCHLD)
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
        # Closed by exec, or holding the error. The editor has ended, so the read does not block.
        failed = os.read(errors, 16) if edited.status == _NOT_THERE else b""
        return Edited(None, OSError(int(failed), os.strerror(int(failed)))) if failed else edited
    finally:
        kill_below(kernel.collect_dead, lambda wait_ms: _pause(wake, wait_ms))
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for fd in (wake, wake_in, errors, errors_in):
            if fd >= 0:
                os.close(fd)


def _become(argv: Sequence[str], parent: int, errors_in: int) -> None:
    """Exec the editor in the forked child."""
    try:
        kernel.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*_STOPS_EDITOR, *_EDITORS_OWN, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
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
    """Wait until the time is up, a child has ended or a signal has come."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.poll(max(0, wait_ms))
    with contextlib.suppress(BlockingIOError):
        os.read(wake, 4096)
