"""Supervisors for the threads of any program: no event loop, no signal handler, no child of the program.

    program ┄┄ zygote ── supervisor ── command

A thread takes a spare supervisor, or has one forked, and speaks to it over a socket of its own. The zygote is detached:
the program may wait for all of its children, and must not find one of ours. It ends with the sockets of the program, as
the supervisors do. A fork of the program has a pool of its own. docs/design.md: R74.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable

from ..core.errors import Failure
from ..core.limits import NS_PER_MS
from . import ipc, kernel
from .clock import monotonic_ns
from .command_task import CommandReport, CommandTask, News
from .kill import VERIFY_LIMIT_MS, signal_process
from .supervisor import LONGEST_WAIT_MS, SUPERVISOR_NAME
from .zygote import COMMANDS, FAREWELL_LIMIT_S, kill_what_lost_its_supervisor, start_detached_zygote

MOST_SPARE = 8  # each is a small process; more than these rarely run at once for long
# Past the kill and its verification. A supervisor without a report by then is broken or stopped.
REPORT_MARGIN_MS = 2_000
SEND_LIMIT_S = 10.0  # exhausted by a supervisor that is not scheduled, and a task that its socket cannot hold


class CommandSupervisor:
    """A supervisor, as the one thread sees it that runs a command under it."""

    def __init__(self, control: socket.socket, zygote_pid: int) -> None:
        self.control = control
        self.is_reusable: bool = True
        self.on_start: Callable[[int], None] | None = None
        self._zygote_pid = zygote_pid
        self._pid = 0
        self._inbox = ipc.MessageReader(control)
        self._give_up_ns: int | None = None

    def send(self, task: CommandTask, fds: list[int]) -> None:
        self._give_up_ns = None
        if task.bell_ns is not None:
            self._expect_report(task.bell_ns)
        ipc.send(self.control, (task.pack(),), fds)

    def order(self, *order: object, within_ms: int = 0) -> None:
        """Send an order. It may come after the end of the command, so the supervisor is not used again."""
        self.is_reusable = False
        self._expect_report(monotonic_ns() + within_ms * NS_PER_MS)
        with contextlib.suppress(ipc.Broken):
            ipc.send(self.control, order)

    def _expect_report(self, end_ns: int) -> None:
        give_up_ns = end_ns + (VERIFY_LIMIT_MS + REPORT_MARGIN_MS) * NS_PER_MS
        self._give_up_ns = give_up_ns if self._give_up_ns is None else min(self._give_up_ns, give_up_ns)

    def poll(self, poller: select.poll) -> list[int]:
        """Return the descriptors that are ready. Raises ipc.Broken if the report is overdue."""
        wait_ms = LONGEST_WAIT_MS
        if self._give_up_ns is not None:
            wait_ms = min(wait_ms, -(-(self._give_up_ns - monotonic_ns()) // NS_PER_MS))
            if wait_ms <= 0:
                raise ipc.Broken("no report in time")
        return [fd for fd, _ in poller.poll(wait_ms)]

    def receive(self) -> CommandReport | None:
        """Read once. Return the report if it has come."""
        report = None
        for message in self._inbox.receive():
            if message[0] == News.ENDED:
                report = CommandReport.unpack(message[1])
                self.is_reusable = self.is_reusable and bool(report.spare_pid)
            elif message[0] == News.STARTED:
                self._pid = message[2]
                if message[1] > 0 and self.on_start is not None:
                    self.on_start(message[1])
        return report

    def replace_report(self) -> CommandReport:
        """Kill the supervisor, which is lost, and everything it guarded."""
        self.is_reusable = False
        if not self._pid:  # it died before its first word, and ran nothing
            return CommandReport(lost=True)
        signal_process(self._pid, signal.SIGKILL)
        try:
            left = kill_what_lost_its_supervisor(self._pid, self._zygote_pid)
        except OSError:  # processes cannot be looked at, for want of descriptors
            left = [kernel.UNKNOWN_PID]
        if kernel.is_zombie(self._zygote_pid):  # it was killed as well: the orphans are anywhere
            left = [kernel.UNKNOWN_PID]
        return CommandReport(lost=True, survivors=[kernel.describe(pid) for pid in left])


class CommandPool:
    """The zygote and the supervisors of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may run a command while its thread starts one
        self._spare: list[CommandSupervisor] = []
        # Weak: where an exception ends a thread between two of our lines, its socket is closed with its last reference.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._zygote: socket.socket | None = None
        self._zygote_pid = 0

    def start(self, task: CommandTask, fds: list[int]) -> CommandSupervisor:
        """Have a command started. Its descriptors may be closed when this returns. Raises ipc.Broken or OSError."""
        while (supervisor := self._take_spare()) is not None:
            try:
                supervisor.send(task, fds)
                return supervisor
            except ipc.Broken:  # it was killed
                supervisor.control.close()
        supervisor = self._fork_supervisor()
        with contextlib.suppress(ipc.Broken):  # a fork that failed is reported
            supervisor.send(task, fds)
        return supervisor

    def _take_spare(self) -> CommandSupervisor | None:
        try:
            return self._spare.pop()
        except IndexError:
            return None

    def release(self, supervisor: CommandSupervisor) -> None:
        if supervisor.is_reusable and len(self._spare) < MOST_SPARE:
            self._spare.append(supervisor)
        else:
            supervisor.control.close()

    def _fork_supervisor(self) -> CommandSupervisor:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_LIMIT_S)
        with theirs, self._lock:
            try:
                self._ask_zygote(theirs.fileno())
            except ipc.Broken:  # it was killed
                self._start_zygote()
                self._ask_zygote(theirs.fileno())
            self._sockets.add(ours)
            return CommandSupervisor(ours, self._zygote_pid)

    def _ask_zygote(self, fd: int) -> None:
        if self._zygote is None:
            self._start_zygote()
        assert self._zygote is not None
        ipc.send_fds(self._zygote, COMMANDS, [fd])

    def _start_zygote(self) -> None:
        if (unfit := kernel.find_unfitness()) is not None:
            raise Failure("MACHINE_UNFIT", unfit)
        if self._zygote is not None:
            self._zygote.close()
        self._zygote, self._zygote_pid = start_detached_zygote()

    def helpers(self) -> list[int]:
        """Return the zygote and the supervisors, for a subreaper that finds them among its children."""
        if self._zygote is None:
            return []
        below = kernel.children_of(self._zygote_pid)
        return [self._zygote_pid, *(pid for pid in below if kernel.name_of(pid) == SUPERVISOR_NAME)]

    def close(self) -> None:
        """End the supervisors and the zygote. A command of a daemon thread ends with the process, just after this."""
        spare = [supervisor.control for supervisor in self._spare]
        is_busy = any(control not in spare and control.fileno() >= 0 for control in self._sockets)
        if self._zygote is None or is_busy:
            return
        for sock in (*spare, self._zygote):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        self._zygote.settimeout(FAREWELL_LIMIT_S + VERIFY_LIMIT_MS / 1000)
        with contextlib.suppress(OSError):
            self._zygote.recv(1)  # the end of file: it has exited
        self.forget()

    def forget(self) -> None:
        """Close the sockets in a fork of the program. The supervisors belong to the parent."""
        for control in list(self._sockets):
            control.close()
        if self._zygote is not None:
            self._zygote.close()
        self.__init__()  # type: ignore[misc]


pool: CommandPool = CommandPool()
atexit.register(pool.close)
os.register_at_fork(after_in_child=pool.forget)
