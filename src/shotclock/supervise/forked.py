"""A forked child of a blocking, single-threaded program, which can be killed: a function of our own, or an editor.

    program (holds the clock) ── child (runs the function) ── anything

A file system or a `/proc` entry that does not answer hangs the child, and the program still answers on time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn, TypeVar

from ..core.envelope import describe_exception
from ..core.limits import NS_PER_MS
from ..core.value_types import value
from . import kernel
from .clock import monotonic_ns
from .kill import STOP_SIGNALS, Cgroup, kill_below, signal_process
from .supervisor import LONGEST_WAIT_MS

T = TypeVar("T")

_PREFIX = 8
_CHUNK = 64 * 1024


class Unfinished(Exception):
    """The function did not return. `survivors` could not be killed."""

    survivors: list[dict[str, object]] = []  # noqa: RUF012  replaced, never changed


class Overdue(Unfinished):
    """The function's time was up."""


class StoppedBySignal(Unfinished):
    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name
        self.exit_code: int = 128 + number
        super().__init__(f"stopped by {self.signal}")


class Died(Unfinished):
    """The child ended without an answer."""


class NotStarted(Unfinished):
    """No child could be forked."""


class Raised(Unfinished):
    """The function raised an exception."""

    def __init__(self, name: str, text: str, lines: str) -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name = name
        self.lines = lines


class _SignalWatch:
    """The signals of this program while it waits for a child: `stops` are recorded, `others` only end a wait."""

    def __init__(self, stops: Sequence[signal.Signals], others: Sequence[signal.Signals]) -> None:
        self.received: list[signal.Signals] = []
        self._stops = stops
        self._previous = {number: signal.signal(number, self._receive) for number in (*stops, *others)}
        self._previous_fd = signal.set_wakeup_fd(-1)
        self._wake, self._wake_in = kernel.open_signal_pipe()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number in self._stops:
            self.received.append(signal.Signals(number))

    def wait(self, wait_ms: int, *fds: int) -> None:
        poller = select.poll()
        for fd in (self._wake, *fds):
            poller.register(fd, select.POLLIN)
        poller.poll(max(0, min(wait_ms, LONGEST_WAIT_MS)))
        kernel.empty(self._wake)

    def reset_in_child(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for fd in (self._wake, self._wake_in):
            os.close(fd)


def _wait_ms(until_ns: int) -> int:
    return -(-(until_ns - monotonic_ns()) // NS_PER_MS)


def run(function: Callable[[], T], *, until_ns: int | None) -> T:
    """Return the result, or raise Unfinished with any survivors. Not for programs with threads or other children."""
    kernel.become_subreaper()
    watch = _SignalWatch(STOP_SIGNALS, [signal.SIGCHLD])
    answer, answer_in = os.pipe()
    os.set_blocking(answer, False)
    me, pid = os.getpid(), -1
    with contextlib.suppress(Exception):
        sys.stdout.flush()  # or the child would write it a second time
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    try:
        try:
            pid = os.fork()
        except OSError as error:
            raise NotStarted(f"no new process could be started: {os.strerror(error.errno or 0)}") from None
        if pid == 0:
            _become(function, me, answer_in, watch)
        received = _await_answer(pid, answer, watch, until_ns)
    finally:
        left = _end_everything(pid, watch) if pid > 0 else []
        watch.close()
        os.close(answer)
        os.close(answer_in)
    if isinstance(received, Unfinished):
        unfinished = received
    else:
        kind, content = pickle.loads(received)
        if kind == "returned":  # it counts, also if a signal came just then: the function had ended by itself
            return content  # type: ignore[no-any-return]
        unfinished = Raised(*content)
    if watch.received:  # Ctrl-C reaches the child as well; its own answer then only reports the interruption
        unfinished = StoppedBySignal(watch.received[0])
    unfinished.survivors = [kernel.describe(survivor) for survivor in left]
    raise unfinished


def _become(function: Callable[[], object], parent: int, answer: int, watch: _SignalWatch) -> NoReturn:
    try:
        kernel.die_with_parent(parent)
        watch.reset_in_child()
        try:
            reply: tuple[str, object] = ("returned", function())
        except BaseException as error:
            reply = ("raised", describe_exception(error))
        body = pickle.dumps(reply)
        message = memoryview(len(body).to_bytes(_PREFIX, "little") + body)
        while message:  # bounded by the parent, which reads, or kills us
            message = message[os.write(answer, message) :]
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _await_answer(pid: int, answer: int, watch: _SignalWatch, until_ns: int | None) -> bytes | Unfinished:
    """Return the whole answer, or why there is none. The end of file proves nothing: others may hold the pipe too."""
    buffer = bytearray()
    while True:
        watch.wait(LONGEST_WAIT_MS if until_ns is None else _wait_ms(until_ns), answer)
        # Before the last read, which then gets all it wrote. Not reaped: its pid must not be reused before its tree is
        # killed.
        died = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(answer, _CHUNK):
                buffer += chunk
        if len(buffer) >= _PREFIX and len(buffer) - _PREFIX >= int.from_bytes(buffer[:_PREFIX], "little"):
            return bytes(buffer[_PREFIX:])
        if died or watch.received:
            return Died("it ended without an answer")
        if until_ns is not None and monotonic_ns() >= until_ns:
            return Overdue("it did not answer in time")


def _end_everything(child: int, watch: _SignalWatch) -> list[int]:
    below = kernel.descendants(os.getpid())
    if not below:  # it has ended, or /proc is missing, which is a case for `doctor`
        signal_process(child, signal.SIGKILL)
    left = kill_below(kernel.collect_dead, watch.wait)
    for pid in below:  # a killed supervisor cannot remove its own
        if (cgroup := Cgroup.left_by(pid)) is not None:
            cgroup.remove()
    return left


# An editor stays in our session and process group, because a supervisor would take the terminal from it (`/dev/tty`,
# the size of the window, Ctrl-Z). So this process guards it: the editor is stopped when its time is up, when this
# process receives a stop signal, and by the kernel when this process is killed.

# Between SIGTERM and SIGKILL: time for an editor to save its buffers.
EDITOR_GRACE_MS = 2_000


@value
class Edited:
    status: int | None  # its exit code, or minus its signal
    why_not: OSError | None = None
    overdue: bool = False
    signal: str | None = None

    @property
    def is_well(self) -> bool:
        return self.status == 0 and not self.overdue and self.signal is None


def run_editor(argv: Sequence[str], *, until_ns: int) -> Edited:
    """Run an editor to its end, or until this process is to stop. Not for programs with threads or other children."""
    kernel.become_subreaper()
    # The terminal sends INT and QUIT to its whole foreground, and the editor handles them: Emacs uses one for Ctrl-G.
    watch = _SignalWatch([signal.SIGTERM, signal.SIGHUP], [signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD])
    try:
        editor = subprocess.Popen(argv, preexec_fn=partial(kernel.die_with_parent, os.getpid()))
        return _await_editor(editor, watch, until_ns)
    except OSError as error:
        return Edited(None, error)
    finally:
        kill_below(kernel.collect_dead, watch.wait)
        watch.close()


def _await_editor(editor: subprocess.Popen[bytes], watch: _SignalWatch, until_ns: int) -> Edited:
    kill_ns: int | None = None
    overdue = False
    while True:
        status = editor.poll()
        now_ns = monotonic_ns()
        if status is not None or (kill_ns is not None and now_ns >= kill_ns):
            return Edited(status, None, overdue, watch.received[0].name if watch.received else None)
        if kill_ns is None and (watch.received or now_ns >= until_ns):
            overdue = not watch.received
            kill_ns = now_ns + EDITOR_GRACE_MS * NS_PER_MS
            for number in (signal.SIGTERM, signal.SIGCONT):
                signal_process(editor.pid, number)
        watch.wait(_wait_ms(kill_ns or until_ns))
