"""Run one command from a blocking, single-threaded program: `shotclock exec`. No event loop, cheap to import."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from types import FrameType

from ..core.deadlines import NS_PER_MS
from . import kernel, wire
from .assignment import Assignment, Report
from .cgroups import Cgroup
from .clock import monotonic_ns, pause
from .killing import VERIFY_LIMIT_MS, kill_below
from .supervisor import LONGEST_WAIT_MS, Supervisor

# Past the latest kill, the verification and this, the supervisor itself must be broken.
REPORT_MARGIN_MS = 3_000
# After a second signal we leave at once, but a kill is usually reported within a few milliseconds.
LAST_WORD_MS = 500

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Hears the signals that mean "stop" from the moment it is made until the process ends."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.fd, self._fd_in = os.pipe()
        for fd in (self.fd, self._fd_in):
            os.set_blocking(fd, False)
        for number in _STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._hear)
        signal.set_wakeup_fd(self._fd_in, warn_on_full_buffer=False)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)

    @property
    def first(self) -> str | None:
        return signal.Signals(self.heard[0]).name if self.heard else None

    def forget(self) -> None:
        """In a child: they are our parent's affair."""
        signal.set_wakeup_fd(-1)
        for fd in (self.fd, self._fd_in):
            os.close(fd)


def fill_standard_descriptors() -> None:
    """If we were started with closed ones, the next thing opened would become our stdin, stdout or stderr."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def run(task: Assignment, signals: Signals) -> Report:
    """Run the command to its end. A signal to us stops it; if we are killed, its supervisor kills it.

    Nothing survives this call, except what the report lists as survivors or was asked to be left.
    """
    kernel.become_subreaper()  # so that even if the supervisor is killed, its orphans come to us
    control, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError as error:
        return Report(unstartable=("fork", error.errno or 0))
    if pid == 0:
        try:
            signals.forget()
            control.close()
            Supervisor(theirs).run_command(task)
        finally:
            os._exit(0)
    theirs.close()
    if task.stdin:
        _let_go_of_stdin()
    with control:
        report = _await_report(task, control, signals)
    if report is None:
        return _lost_supervisor(pid, signals)
    _collect(pid)
    return report


def _await_report(task: Assignment, control: socket.socket, signals: Signals) -> Report | None:
    inbox = wire.Inbox(control)
    heard = signals.heard
    told = 0
    give_up_ns: int | None = None
    if task.kill_ns is not None:
        give_up_ns = task.kill_ns + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
    while True:
        if len(heard) > told:
            # The second signal means "now": no more grace, and no more waiting for the work to be polite.
            order = "stop" if told == 0 and len(heard) == 1 else "kill"
            with contextlib.suppress(wire.Broken):
                wire.send(control, (order, signals.first))
            if order == "kill":
                give_up_ns = monotonic_ns() + LAST_WORD_MS * NS_PER_MS
            told = len(heard)
        wait = LONGEST_WAIT_MS
        if give_up_ns is not None:
            wait = max(0, min(wait, -(-(give_up_ns - monotonic_ns()) // NS_PER_MS)))
        poller = select.poll()
        poller.register(control, select.POLLIN)
        poller.register(signals.fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(wait)}
        if signals.fd in ready:
            with contextlib.suppress(OSError):
                os.read(signals.fd, 512)
        if control.fileno() in ready:
            try:
                messages = inbox.receive()
            except BlockingIOError:
                messages = []
            except wire.Broken:
                return None
            for message in messages:
                if message[0] == "ended":
                    return Report.unpack(message[1])
        elif give_up_ns is not None and monotonic_ns() >= give_up_ns:
            return None


def _let_go_of_stdin() -> None:
    """Whoever writes into it must notice when the command, the only one to read it, closes it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _collect(pid: int) -> None:
    """The supervisor exits right after its report; leave no zombie, but do not wait for a wedged one."""
    for _ in range(200):
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:
            return
        pause(0.001)


def _lost_supervisor(pid: int, signals: Signals) -> Report:
    """Somebody killed the supervisor (or it is wedged): what it guarded is ours now, and is killed here."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)

    cgroup = Cgroup.left_by(pid)
    if cgroup is not None:
        cgroup.kill()
    left = kill_below(kernel.collect_dead, lambda wait_ms: pause(wait_ms / 1000))
    if cgroup is not None:
        cgroup.remove()
    return Report(survivors=[kernel.describe(survivor) for survivor in left], stopped=signals.first)
