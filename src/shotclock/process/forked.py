"""A function of our own, run by a blocking, single-threaded program in a forked child that can be killed.

    program (holds the clock) ── child (runs the function) ── anything

The subcommands other than `exec` run like this, and each probe of `doctor` again inside: a file system or a `/proc`
entry that does not answer hangs the child, and the program still answers on time.

docs/design.md: R17.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

from ..core.clocks import NS_PER_MS
from . import kernel
from .clock import monotonic_ns
from .kill import STOP_SIGNALS, Cgroup, kill_below, signal_process
from .supervisor import LONGEST_WAIT_MS

T = TypeVar("T")

_PREFIX = 8
_CHUNK = 64 * 1024


class Unfinished(Exception):
    """The function did not return. `survivors` are the processes that could not be killed."""

    survivors: list[dict[str, object]] = []  # noqa: RUF012  replaced, never changed


class Overdue(Unfinished):
    """The function's time was up."""


class StoppedBySignal(Unfinished):
    """A signal stopped this program."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number).name
        self.exit_code = 128 + number
        super().__init__(f"stopped by {self.signal}")


class Died(Unfinished):
    """The child ended without an answer."""


class NotStarted(Unfinished):
    """No child could be forked."""


class Raised(Unfinished):
    """The function raised an exception; its traceback is kept as text."""

    def __init__(self, name: str, text: str, lines: str) -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name = name
        self.lines = lines


def run(function: Callable[[], T], *, until_ns: int | None) -> T:
    """Return the function's result, or raise Unfinished. Not for programs with threads or other children.

    None of its processes survives this call, except the survivors of the exception.
    """
    kernel.become_subreaper()
    answer, answer_in = os.pipe()
    wake, wake_in = os.pipe()
    for fd in (answer, wake, wake_in):
        os.set_blocking(fd, False)
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            heard.append(number)

    previous = {number: signal.signal(number, hear) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    previous_fd = signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    me = os.getpid()
    with contextlib.suppress(Exception):
        sys.stdout.flush()  # or the child would write it a second time
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    pid = -1
    try:
        try:
            pid = os.fork()
        except OSError as error:
            raise NotStarted(f"no new process could be started: {os.strerror(error.errno or 0)}") from None
        if pid == 0:
            _become(function, me, answer_in)
        os.close(answer_in)
        answer_in = -1
        received = _await_answer(pid, answer, wake, heard, until_ns)
    finally:
        left = _end_everything(pid, wake) if pid > 0 else []
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for fd in (answer, answer_in, wake, wake_in):
            if fd >= 0:
                os.close(fd)
    unfinished: Unfinished = Died("it ended without an answer")
    if received is not None:
        kind, content = pickle.loads(received)
        if kind == "returned":
            return content  # type: ignore[no-any-return]
        unfinished = Raised(*content)
    elif until_ns is not None and monotonic_ns() >= until_ns:
        unfinished = Overdue("it did not answer in time")
    if heard:  # Ctrl-C reaches the child as well; its own answer then only reports the interruption
        unfinished = StoppedBySignal(heard[0])
    unfinished.survivors = [kernel.describe(survivor) for survivor in left]
    raise unfinished


def _become(function: Callable[[], object], parent: int, answer: int) -> NoReturn:
    """Run the function in the child, from fork to exit."""
    try:
        kernel.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        try:
            reply: tuple[str, object] = ("returned", function())
        except BaseException as error:
            reply = ("raised", (type(error).__name__, str(error), "".join(traceback.format_exception(error))))
        body = pickle.dumps(reply)
        message = memoryview(len(body).to_bytes(_PREFIX, "little") + body)
        while message:  # bounded by the parent, which reads, or kills us
            message = message[os.write(answer, message) :]
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _await_answer(pid: int, answer: int, wake: int, heard: list[int], until_ns: int | None) -> bytes | None:
    """Return the whole answer, or None if the child died, the time is up or a signal came first.

    The end of file proves nothing: processes of the child may hold the pipe as well.
    """
    buffer = bytearray()
    poller = select.poll()
    poller.register(answer, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        wait_ms = LONGEST_WAIT_MS
        if until_ns is not None:
            wait_ms = max(0, min(wait_ms, -(-(until_ns - monotonic_ns()) // NS_PER_MS)))
        poller.poll(wait_ms)
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)
        died = _has_ended(pid)  # before the last read, which then gets all it wrote
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(answer, _CHUNK):
                buffer += chunk
        if len(buffer) >= _PREFIX and len(buffer) - _PREFIX >= int.from_bytes(buffer[:_PREFIX], "little"):
            return bytes(buffer[_PREFIX:])
        if died or heard or (until_ns is not None and monotonic_ns() >= until_ns):
            return None


def _has_ended(pid: int) -> bool:
    """Return whether the child has ended, without reaping it: its pid must not be reused until its tree is killed."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_everything(child: int, wake: int) -> list[int]:
    poller = select.poll()
    poller.register(wake, select.POLLIN)

    def pause(wait_ms: int) -> None:  # or until a child has died
        poller.poll(wait_ms)
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 4096)

    below = kernel.descendants(os.getpid())
    if not below:  # it has ended, or /proc is missing, which is a case for `doctor`
        signal_process(child, signal.SIGKILL)
    left = kill_below(kernel.collect_dead, pause)
    for pid in below:  # a killed supervisor cannot remove its own
        if (cgroup := Cgroup.left_by(pid)) is not None:
            cgroup.remove()
    return left
