"""Run of one command from a blocking, single-threaded program: `shotclock exec`. No event loop, cheap to import."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType

from ..core.clocks import NS_PER_MS, ClockKind
from . import ipc, kernel
from .clock import monotonic_ns, pause
from .command_task import CommandReport, CommandTask, News, Order
from .kill import STOP_SIGNALS, VERIFY_LIMIT_MS, Cgroup, kill_below
from .supervisor import LATE_BELL_MS, LONGEST_WAIT_MS, LOOK_PAUSE_MS, SILENT_LIMIT_MS, Supervisor

# Past the latest kill, the verification and this, the supervisor itself must be broken.
REPORT_MARGIN_MS = 3_000
# After a second signal we leave at once, but a kill is usually reported within a few milliseconds.
LAST_WORD_MS = 500

# Some send a signal twice at once, to a process and to its group (`timeout` does): that is one wish, not two.
ONE_WISH_MS = 200

# What nohup, or the shell of a background job, had ignored stays ignored.
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


class Signals:
    """Signals that mean "stop", and Ctrl-Z, as they come from the moment this is made until the process ends."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.suspension_asked = False
        self.fd, self._fd_in = os.pipe()
        for fd in (self.fd, self._fd_in):
            os.set_blocking(fd, False)
        for number in (*STOP_SIGNALS, signal.SIGTSTP):
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._hear)
        signal.set_wakeup_fd(self._fd_in, warn_on_full_buffer=False)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self.suspension_asked = True
        else:
            self.heard.append(number)

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z would have. Returns once it is continued; at once, where no shell could."""
        self.suspension_asked = False
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._hear)

    @property
    def first(self) -> str | None:
        return signal.Signals(self.heard[0]).name if self.heard else None

    def forget(self) -> None:
        """Close the descriptors, in a child: signals are our parent's affair."""
        signal.set_wakeup_fd(-1)
        for fd in (self.fd, self._fd_in):
            os.close(fd)


def fill_standard_descriptors() -> None:
    """Open those of the standard descriptors that are closed: otherwise the next thing opened would become our stdin,
    stdout or stderr."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one. A closed stdout takes nothing: no output is lost unseen.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)


class Negotiation:
    """Decides about a command while it runs: when to act next, and what to do then. This one has nothing to decide."""

    act_ns: int | None = None
    fds: tuple[int, ...] = ()
    """Where something may come that it waits for."""

    def act(self, order: Callable[..., None]) -> None:
        """Do what is due."""

    def take_look(self, stdout: bytes, stderr: bytes, written: int) -> None:
        """Take what the command has written so far."""

    def take(self, fd: int, order: Callable[..., None]) -> None:
        """Read what came on one of `fds`."""

    def close(self) -> None:
        """Leave nothing behind."""


NO_NEGOTIATION = Negotiation()


def run(task: CommandTask, signals: Signals, negotiation: Negotiation = NO_NEGOTIATION) -> CommandReport:
    """Run the command to its end. A signal to us stops it; if we are killed, its supervisor kills it.

    Nothing survives this call, except what the report lists as survivors or was asked to be left.
    """
    if kernel.find_unfitness() is not None:
        return CommandReport(unstartable=("machine", 0))
    kernel.become_subreaper()  # so that even if the supervisor is killed, its orphans come to us
    control, theirs = ipc.pair()
    try:
        pid = os.fork()
    except OSError as error:
        return CommandReport(unstartable=("fork", error.errno or 0))
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
    with contextlib.closing(control):
        try:
            report = _await_report(task, control, signals, pid, negotiation)
        finally:
            negotiation.close()
    if report is None:
        return _replace_lost_supervisor(pid, task, signals)
    _collect(pid)
    return report


def _await_report(
    task: CommandTask, control: ipc.Socket, signals: Signals, supervisor: int, negotiation: Negotiation
) -> CommandReport | None:
    inbox = ipc.MessageReader(control)
    heard = signals.heard
    passed_on, stopped_ns = 0, 0
    order = partial(_order, control)
    give_up_ns: int | None = None
    look_ns: int | None = None  # when to look whether somebody has stopped it
    bell_ns: int | None = -1
    while True:
        if negotiation.act_ns is not None and monotonic_ns() >= negotiation.act_ns:
            negotiation.act(order)
        if task.bell_ns != bell_ns and not heard:  # at first, and where it was moved
            bell_ns = task.bell_ns
            give_up_ns = look_ns = None
            if task.kill_ns is not None:
                give_up_ns = task.kill_ns + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
            if task.bell_ns is not None:
                look_ns = task.bell_ns + LATE_BELL_MS * NS_PER_MS
        if look_ns is not None and (now := monotonic_ns()) >= look_ns:
            look_ns = now + LOOK_PAUSE_MS * NS_PER_MS
            if kernel.is_stopped(supervisor):
                if task.kill_ns is not None and now >= task.kill_ns + SILENT_LIMIT_MS * NS_PER_MS:
                    return None
                os.kill(supervisor, signal.SIGCONT)
        if len(heard) > passed_on:
            now = monotonic_ns()
            look_ns = now + LATE_BELL_MS * NS_PER_MS
            if passed_on == 0:
                stopped_ns = now
                _order(control, Order.STOP, signals.first)
            elif now - stopped_ns > ONE_WISH_MS * NS_PER_MS:
                # The second signal means "now": no more grace, and no more waiting for the work to be polite.
                _order(control, Order.KILL, signals.first)
                give_up_ns = now + LAST_WORD_MS * NS_PER_MS
            passed_on = len(heard)
        if signals.suspension_asked:
            signals.suspension_asked = False
            _order(control, Order.SUSPEND)
        wait = LONGEST_WAIT_MS
        for at_ns in (give_up_ns, look_ns, negotiation.act_ns):
            if at_ns is not None:
                wait = max(0, min(wait, -(-(at_ns - monotonic_ns()) // NS_PER_MS)))
        poller = select.poll()
        poller.register(control, select.POLLIN)
        poller.register(signals.fd, select.POLLIN)
        for fd in negotiation.fds:
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(wait)}
        if signals.fd in ready:
            with contextlib.suppress(OSError):
                os.read(signals.fd, 512)
        for fd in ready.intersection(negotiation.fds):
            negotiation.take(fd, order)
        if control.fileno() in ready:
            try:
                messages = inbox.receive()
            except BlockingIOError:
                messages = []
            except ipc.Broken:
                return None
            for message in messages:
                if message[0] == News.ENDED:
                    return CommandReport.unpack(message[1])
                if message[0] == News.LOOKED:
                    negotiation.take_look(*message[1:])
                if message[0] == News.SUSPENDED:
                    signals.suspend()
                    _order(control, Order.CONTINUE)
        elif give_up_ns is not None and monotonic_ns() >= give_up_ns:
            return None


def _order(control: ipc.Socket, *words: object) -> None:
    with contextlib.suppress(ipc.Broken):
        ipc.send(control, words)


def _let_go_of_stdin() -> None:
    """Replace stdin: whoever writes into it must notice when the command, the only one to read it, closes it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _collect(pid: int) -> None:
    """Reap the supervisor, which exits right after its report; leave no zombie, but do not wait for a wedged one."""
    for _ in range(200):
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return
        except ChildProcessError:
            return
        pause(0.001)


def _replace_lost_supervisor(pid: int, task: CommandTask, signals: Signals) -> CommandReport:
    """Kill what a supervisor guarded that somebody killed (or that is wedged), and return the report."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)

    cgroup = Cgroup.left_by(pid)
    if cgroup is not None:
        cgroup.kill()
    left = kill_below(kernel.collect_dead, lambda wait_ms: pause(wait_ms / 1000))
    if cgroup is not None:
        cgroup.remove()
    report = CommandReport(lost=True, survivors=[kernel.describe(survivor) for survivor in left], stopped=signals.first)
    now_ns = monotonic_ns()
    if task.bell_ns is not None and now_ns >= task.bell_ns:
        report.fired, report.elapsed_ns = ClockKind.TIMEOUT.value, now_ns - task.started_ns
    return report
