"""One command run by a blocking, single-threaded program, `shotclock exec`: no event loop, cheap to import."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import NoReturn

from ..core.limits import NS_PER_MS
from . import ipc, kernel
from .client import LAST_WORD_MS, REPORT_LIMIT_MS, StopSignals, SupervisorClient
from .clock import monotonic_ns, pause
from .command_task import PYTHON_IGNORES, CommandReport, CommandTask, News, Order, takes_more
from .kill import STOP_SIGNALS, Cgroup, is_group_there, kill_below, signal_process
from .runners import Runners
from .supervisor import GUARD_LOOK_MS, LONGEST_WAIT_MS, Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .owner import OwnerWatch

# The most time of a command between SIGTERM and SIGKILL when its owner is gone: no one waits for its result any more.
OWNER_GRACE_MS = 1_000
OWNER_GONE = "the process that it belongs to is gone"
_DESCRIPTORS_NEEDED = 8  # of the supervisor, which finds and kills the processes of a command, and ours

# On a terminal the keyboard sends these to the command as well as to us.
KEYBOARD_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
# Signals that stay ignored if nohup, or the shell of a background job, had them ignored.
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
# Other signals that would end us. They say nothing about faults of ours, so they are meant for the command.
_NAMES = ("USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "XCPU", "ABRT", "STKFLT")
_FORWARDED = {
    *(signal.Signals[f"SIG{name}"] for name in _NAMES if f"SIG{name}" in signal.Signals.__members__),
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if kernel.LINUX else ()),
}

# Leaves the alternate screen without a jump of the cursor, shows the cursor, and ends colours and bracketed paste.
_PLAIN_SCREEN = b"\x1b[?1047l\x1b[?25h\x1b[?2004l\x1b[0m"

_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")  # the locales that Python sets in place of C


class TerminalSignals:
    """The stop signals and Ctrl-Z that this process receives. With `has_alarm`, SIGALRM ends the timeout."""

    def __init__(self, *, has_alarm: bool = False) -> None:
        self.heard: list[int] = []
        self._to_forward: list[int] = []
        self._alarm_rang = False
        self._stops = StopSignals()
        self._suspension_asked = False
        self._passed_on = 0
        for number in (*STOP_SIGNALS, signal.SIGTSTP, *([signal.SIGALRM] if has_alarm else [])):
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        self._continuing = kernel.ContinuingTimer()
        self._is_guarding = False
        try:
            self._pipe = kernel.open_signal_pipe()
        except OSError:  # `start` finds too few descriptors as well, and starts nothing
            self._pipe = -1, -1
        self.fd: int = self._pipe[0]
        self._keyboard_fd = -1
        self._blocked: set[signal.Signals] = set()
        self._terminal_fd = -1
        self._modes = b""

    def leave_keyboard_to_command(self) -> None:
        """Ignore Ctrl-C and Ctrl-\\, which the command receives itself. Those signals from elsewhere still count.

        A handler does not see the origin of a signal. A descriptor shows it, if the signal is blocked.
        """
        keys = [number for number in KEYBOARD_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._keyboard_fd = kernel.open_signal_descriptor(keys)
        if self._keyboard_fd < 0:
            return
        self._blocked = set(keys) - signal.pthread_sigmask(signal.SIG_BLOCK, keys)
        both = select.epoll()
        for fd in (self.fd, self._keyboard_fd):
            both.register(fd, select.EPOLLIN)
        self._both, self.fd = both, both.fileno()

    def take_keyboard_back(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._blocked)

    def forward_others(self) -> None:
        """Pass signals on to the command that would end us without being a request to stop it."""
        for number in _FORWARDED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: self._to_forward.append(number))

    def guard(self, is_guarding: bool) -> None:
        """Have the kernel continue this process, which the work may stop, as long as it guards a supervisor."""
        self._is_guarding = is_guarding
        self._continuing.arm(GUARD_LOOK_MS if is_guarding else 0, GUARD_LOOK_MS)

    def remember_terminal(self) -> None:
        """Remember the modes of the terminal that the command uses."""
        with contextlib.suppress(OSError):
            number = next(filter(os.isatty, (0, 1, 2)), -1)
            self._terminal_fd = os.dup(number) if number >= 0 else os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
            if os.tcgetpgrp(self._terminal_fd) == os.getpgrp():  # otherwise they are those of another job
                self._modes = kernel.terminal_modes(self._terminal_fd)

    def restore_terminal(self) -> None:
        """Undo what a killed command has left of its modes and screen, unless another job has the terminal now."""
        if not self._modes or kernel.terminal_modes(self._terminal_fd) in (b"", self._modes):
            return
        with contextlib.suppress(OSError):
            group = os.tcgetpgrp(self._terminal_fd)
            if group != os.getpgrp() and is_group_there(group):
                return
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        kernel.set_terminal_modes(self._terminal_fd, self._modes)
        with contextlib.suppress(OSError):
            if takes_more(self._terminal_fd):
                os.write(self._terminal_fd, _PLAIN_SCREEN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self._suspension_asked = True
        elif number == signal.SIGALRM:
            self._alarm_rang = True
        else:
            self.heard.append(number)

    def next_order(self) -> tuple[str, ...] | None:
        kernel.empty(self._pipe[0])
        while self._keyboard_fd >= 0 and (read := kernel.read_signal(self._keyboard_fd)) is not None:
            number, is_key = read
            if not is_key:
                self.heard.append(number)
        if self._suspension_asked:
            self._suspension_asked = False
            return (Order.SUSPEND,)
        if self._alarm_rang:
            self._alarm_rang = False
            return (Order.RING,)
        if self._to_forward:
            return (Order.SIGNAL, str(self._to_forward.pop(0)))
        if len(self.heard) == self._passed_on:
            return None
        number = self.heard[self._passed_on]
        self._passed_on = len(self.heard)
        return self._stops.order(monotonic_ns(), signal.Signals(number).name)

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z would have, unless no shell could continue it."""
        self._suspension_asked = False
        self._continuing.disarm()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._receive)
        self.guard(self._is_guarding)

    @property
    def stopped_by(self) -> str | None:
        """Return the name of the signal that was passed on to stop the command."""
        return self._stops.first

    def forget(self) -> None:
        """Close the descriptors in a forked child: the parent handles the signals."""
        signal.set_wakeup_fd(-1)
        for fd in self._pipe:
            os.close(fd)
        if self._keyboard_fd >= 0:
            self._both.close()
            os.close(self._keyboard_fd)
            self.take_keyboard_back()
        if self._terminal_fd >= 0:
            os.close(self._terminal_fd)


def has_input(*, passes_stdin: bool) -> bool:
    """Return whether a command could wait for input: from a terminal, or from a stdin that is a pipe or a socket."""
    mode = os.fstat(0).st_mode
    is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return (is_stream and passes_stdin) or os.isatty(0) or kernel.has_terminal(os.getpid())


def fill_standard_descriptors() -> None:
    """Open the standard descriptors that are closed: the next file opened would become stdin, stdout or stderr."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one. A closed stdout is opened for reading only, so that writing
            # to it fails and no output is lost unnoticed.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)


def restore_locale() -> None:
    """Give LC_CTYPE the value that this process was started with. Python replaces the C locale in the environment."""
    started_with = kernel.environment_of(os.getpid()) if os.environ.get("LC_CTYPE") in _COERCED else []
    if not started_with:
        return
    given = [entry.partition(b"=")[2] for entry in started_with if entry.startswith(b"LC_CTYPE=")]
    if given:
        os.environb[b"LC_CTYPE"] = given[0]
    else:
        del os.environ["LC_CTYPE"]


def die_of(number: int) -> None:
    """End this process by a signal: a shell then ends its loop, as it does when the signal ends the command itself."""
    kernel.forbid_core_dump()
    if number != signal.SIGKILL:  # which has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal does not end a process, as SIGCHLD


def has_terminal() -> bool:
    """Return whether stdin or stdout is a terminal, or this process has one as /dev/tty."""
    if os.isatty(0) or os.isatty(1):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def replace_this_process(path: str, argv: list[str]) -> NoReturn:
    """Exec another program, with the signals that Python ignores at their defaults. Raises OSError."""
    for number in PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    os.execv(path, argv)


def run(
    task: CommandTask,
    signals: TerminalSignals,
    on_signal: Callable[[int], None] = lambda number: None,
    owner: OwnerWatch | None = None,
) -> CommandReport:
    """Run the command to its end. Nothing survives but the reported survivors and children that were to be left.

    `on_signal` is called with each signal that is sent to the command, if the task wants that. The command is stopped
    when its owner is gone.
    """
    signals.forward_others()
    if kernel.is_proc_foreign():
        task.input_ms = 0
    supervisor = PolledSupervisor.start(task, signals, falls_back=True)
    if isinstance(supervisor, CommandReport):
        return supervisor
    with contextlib.closing(supervisor):
        _follow(supervisor, signals, on_signal, owner)
    report = supervisor.finish(signals)
    signals.guard(False)  # from now on a background job may wait for its terminal
    return report


class PolledSupervisor:
    """The client of a supervisor, and its socket, in a program or thread that polls."""

    def __init__(self, control: ipc.Socket, client: SupervisorClient) -> None:
        self.control = control
        self.client = client
        self._inbox = ipc.MessageReader(control)
        self._now_ns = 0

    @staticmethod
    def start(
        task: CommandTask,
        signals: TerminalSignals,
        handed: Sequence[int] = (),
        ours: Sequence[int] = (),
        *,
        falls_back: bool = False,
    ) -> PolledSupervisor | CommandReport:
        """Start the command under a supervisor. `handed` become its standard streams; `ours` are of this process alone.

        The supervisor closes those, because each side must notice when the other closes its end of a pipe. With
        `falls_back` it also runs where only the children of the supervisor are seen.
        """
        if kernel.find_unfitness() is not None and not (falls_back and kernel.is_proc_foreign()):
            return CommandReport(unstartable=("machine", 0))
        kernel.become_subreaper()  # so that the orphans of a killed supervisor become our children
        try:
            kernel.check_descriptors(_DESCRIPTORS_NEEDED)
            control, theirs = ipc.pair()
        except OSError as error:
            return CommandReport(unstartable=("fork", error.errno or 0))
        if task.shares_group:
            signals.leave_keyboard_to_command()
            signals.remember_terminal()
        signals.guard(True)
        try:
            pid = os.fork()
        except OSError as error:
            signals.guard(False)
            return CommandReport(unstartable=("fork", error.errno or 0))
        if pid == 0:
            try:
                signals.forget()
                control.close()
                for fd in ours:
                    os.close(fd)
                Supervisor(theirs, shares_group=task.shares_group).run_command(task, list(handed))
            finally:
                os._exit(0)
        theirs.close()
        if task.stdin and not handed:  # the writer must notice when the command, its only reader, closes it
            kernel.replace_by_null(0)
        return PolledSupervisor(control, SupervisorClient(task, pid))

    def finish(self, signals: TerminalSignals) -> CommandReport:
        """Reap the supervisor and return its report. Without one, kill everything it guarded."""
        signals.take_keyboard_back()
        report = self.client.report or _replace_lost_supervisor(self.client)
        if report.lost or report.fired is not None or report.stopped is not None:
            signals.restore_terminal()
        for _ in range(200):  # it exits right after its report; a wedged one is not waited for
            try:
                if os.waitpid(self.client.pid, os.WNOHANG)[0] == self.client.pid:
                    break
            except ChildProcessError:
                break
            pause(0.001)
        return report

    def order(self, kind: str, *details: object, report_within_ms: int = REPORT_LIMIT_MS) -> None:
        self.client.order(monotonic_ns(), kind, *details, report_within_ms=report_within_ms)
        self._send_orders()

    def order_by_signal(self, kind: str, *details: object) -> None:
        """Pass a signal on. After a second one this program leaves, with or without the report."""
        self.order(kind, *details, report_within_ms=LAST_WORD_MS)

    def stop_for_owner(self) -> None:
        self.client.stop_within(monotonic_ns(), OWNER_GRACE_MS, OWNER_GONE)
        self._send_orders()

    def wait_ms(self, *alarms: int | None) -> int:
        """Return how long a poll may take: until the client's next instant, or one of the alarms."""
        self._now_ns = monotonic_ns()
        due = [at_ns for at_ns in (self.client.next_ns, *alarms) if at_ns is not None]
        return max(0, min([LONGEST_WAIT_MS, *(-(-(at_ns - self._now_ns) // NS_PER_MS) for at_ns in due)]))

    def handle(self, ready: Collection[int]) -> list[ipc.Message]:
        """Handle the outcome of a poll: the messages, or else the time before it. Return the messages."""
        if self.control.fileno() in ready:
            return self.receive()
        self.tick(self._now_ns)
        return []

    def receive(self) -> list[ipc.Message]:
        messages: list[ipc.Message] = []
        try:
            messages = self._inbox.receive()
        except BlockingIOError:
            pass
        except ipc.Broken:
            self.client.end_of_socket()
        for message in messages:
            self.client.receive(monotonic_ns(), message)
        self._send_orders()
        return messages

    def tick(self, now_ns: int) -> None:
        is_stopped = self.client.is_look_due(now_ns) and kernel.is_stopped(self.client.pid)
        if self.client.tick(now_ns, is_stopped=is_stopped):
            signal_process(self.client.pid, signal.SIGCONT)
        self._send_orders()

    def _send_orders(self) -> None:
        for order in self.client.take_orders():
            with contextlib.suppress(ipc.Broken):
                ipc.send(self.control, order)

    def close(self) -> None:
        self.control.close()


def _follow(
    supervisor: PolledSupervisor, signals: TerminalSignals, on_signal: Callable[[int], None], owner: OwnerWatch | None
) -> None:
    """Wait for the end of the command, and stop it when a signal or the end of its owner asks for that."""
    while supervisor.client.fate is None:
        while (order := signals.next_order()) is not None:
            supervisor.order_by_signal(*order)
        if owner is not None and owner.is_gone:
            owner = None
            supervisor.stop_for_owner()
        poller = select.poll()
        poller.register(supervisor.control, select.POLLIN)
        poller.register(signals.fd, select.POLLIN)
        wait_ms = supervisor.wait_ms()
        if owner is not None and owner.fd >= 0:
            poller.register(owner.fd, select.POLLIN)
        elif owner is not None:
            wait_ms = min(wait_ms, owner.look_ms)
        for message in supervisor.handle({fd for fd, _ in poller.poll(wait_ms)}):
            if message[0] == News.SIGNALLED:
                on_signal(message[1])
            if message[0] == News.SUSPENDED:
                signals.suspend()
                supervisor.order(Order.CONTINUE)


def _replace_lost_supervisor(client: SupervisorClient) -> CommandReport:
    signal_process(client.pid, signal.SIGKILL)
    cgroup = Cgroup.left_by(client.pid)
    if cgroup is not None:
        cgroup.kill()
    runners = Runners(client.task.runners)
    left = kill_below(
        lambda: kernel.collect_dead() or runners.are_alone(),
        lambda wait_ms: pause(wait_ms / 1000),
        find=runners.list_others,
    )
    if cgroup is not None:
        cgroup.remove()
    return client.replace_report(monotonic_ns(), [kernel.describe(pid) for pid in left], runners.jobs())
