"""Supervisors for the threads of any program: no event loop, no signal handler, no child of the program.

    program ┄┄ zygote ── supervisor ── command

A thread takes a spare supervisor, or has one forked, and speaks to it over a socket of its own. The zygote is detached:
the program may wait for all of its children, and must not find one of ours. It ends with the sockets of the program, as
the supervisors do. A fork of the program has a pool of its own.
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
from . import ipc, kernel
from .client import Spares, SupervisorClient
from .clock import monotonic_ns
from .command_task import CommandReport, CommandTask, News
from .foreground import PolledSupervisor
from .kill import VERIFY_LIMIT_MS, signal_process
from .supervisor import SUPERVISOR_NAME
from .zygote import COMMANDS, FAREWELL_LIMIT_S, kill_what_lost_its_supervisor, start_detached_zygote

SEND_LIMIT_S = 10.0  # exhausted by a supervisor that is not scheduled, and a task that its socket cannot hold

OnStart = Callable[[int], None]


class CommandSupervisor(PolledSupervisor):
    """A supervisor, as the one thread sees it that runs a command under it."""

    def __init__(self, control: socket.socket, zygote_pid: int, task: CommandTask, on_start: OnStart | None) -> None:
        super().__init__(control, SupervisorClient(task, starts_itself=True))
        self._zygote_pid = zygote_pid
        self._on_start = on_start

    def begin(self, task: CommandTask, on_start: OnStart | None) -> None:
        """Take another command."""
        self.client = SupervisorClient(task, self.client.pid, starts_itself=True)
        self._on_start = on_start

    def send_task(self, fds: list[int]) -> None:
        ipc.send(self.control, (self.client.task.pack(),), fds)

    @property
    def is_reusable(self) -> bool:
        return self.client.is_reusable

    def wait(self, poller: select.poll) -> list[int]:
        """Wait for an event. Return the descriptors that are ready."""
        ready = [fd for fd, _ in poller.poll(self.wait_ms())]
        for message in self.handle(ready):
            if message[0] == News.STARTED and message[1] > 0 and self._on_start is not None:
                self._on_start(message[1])
        return ready

    def conclude(self) -> CommandReport:
        """Return the report. Without one, kill the supervisor and everything it guarded."""
        return self.client.report or self._replace_report()

    def _replace_report(self) -> CommandReport:
        pid = self.client.pid
        if not pid:  # it died before its first word, and ran nothing
            return self.client.replace_report(monotonic_ns(), [])
        signal_process(pid, signal.SIGKILL)
        try:
            left = kill_what_lost_its_supervisor(pid, self._zygote_pid)
        except OSError:  # processes cannot be looked at, for want of descriptors
            left = [kernel.UNKNOWN_PID]
        if kernel.is_ending(self._zygote_pid):  # it was killed as well: the orphans are anywhere
            left = [kernel.UNKNOWN_PID]
        return self.client.replace_report(monotonic_ns(), [kernel.describe(pid) for pid in left])


class CommandPool:
    """The zygote and the supervisors of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may run a command while its thread starts one
        self._spare: Spares[CommandSupervisor] = Spares()
        # Weak: where an exception ends a thread between two of our lines, its socket is closed with its last reference.
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._zygote: socket.socket | None = None
        self._zygote_pid = 0

    def start(self, task: CommandTask, fds: list[int], on_start: OnStart | None = None) -> CommandSupervisor:
        """Have a command started. Its descriptors may be closed when this returns. Raises ipc.Broken or OSError."""
        while (spare := self._spare.take()) is not None:
            spare.begin(task, on_start)
            try:
                spare.send_task(fds)
                return spare
            except ipc.Broken:  # it was killed
                spare.close()
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_LIMIT_S)
        with theirs, self._lock:
            try:
                self._ask_zygote(theirs.fileno())
            except ipc.Broken:  # it was killed
                self._start_zygote()
                self._ask_zygote(theirs.fileno())
            self._sockets.add(ours)
            supervisor = CommandSupervisor(ours, self._zygote_pid, task, on_start)
        with contextlib.suppress(ipc.Broken):  # a fork that failed is reported
            supervisor.send_task(fds)
        return supervisor

    def release(self, supervisor: CommandSupervisor) -> None:
        self._spare.give_back(supervisor)

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
        spare = [supervisor.control for supervisor in self._spare.list()]
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
