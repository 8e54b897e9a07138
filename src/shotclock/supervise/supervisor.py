"""The supervisor: one small process above each command or worker, whose only job is to end it on time.

    caller ── supervisor ── leader (a command, or a worker running a Python function) ── anything

It is a subreaper, so on Linux all processes of the work stay below it. It holds the limits, so a stuck caller cannot
delay a kill, and the other end of the caller's socket, so when the caller dies everything below is killed. It runs our
code only, has one thread, and while it has work, it waits at most to the next limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import sys
from collections.abc import Callable
from enum import Enum, auto

from ..core.limits import NS_PER_MS, ClockKind
from . import ipc, kernel
from .client import LATE_BELL_MS, LOOK_PAUSE_MS
from .clock import monotonic_ns
from .command_task import (
    RELAY_HELD,
    Capture,
    CommandReport,
    CommandTask,
    News,
    Order,
    Output,
    OutputPipe,
    ShownOutput,
    StartFailed,
    become,
    make_private_directory,
    spawn,
)
from .kill import Cgroup, group_of, kill_below, signal_process
from .runners import Runners

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .input_wait import InputWatch

# How long children may outlive their command before they count as leaked: the end of a pipeline may still write.
LEAK_GRACE_MS = 300
# The same, if they have neither stdin nor output of the command open: they can write nothing any more.
LEAK_LOOK_MS = 50
# The time of leaked children between TERM and KILL. It is short, because their command has ended.
LEAK_STOP_GRACE_MS = 500
# The time between two TERMs for a worker. A signal between Python's check for signals and a blocking system call is
# handled only when the call returns, perhaps never; the next signal interrupts the call.
TERM_AGAIN_MS = 50
# How long the work may take to stop itself after Ctrl-Z (an editor gives the terminal back first), and the most sweeps
# over its tree after that.
SUSPEND_GRACE_MS = 100
SUSPEND_SWEEPS = 20
# How long the caller may take to read a message.
REPORT_LIMIT_S = 10.0
LONGEST_WAIT_MS = 3_600_000  # poll() takes a C int of milliseconds, which a month would overflow
# How often the kernel continues each guard (supervisor, zygote, caller) while it guards something: the work may stop
# them by a signal, and each has to notice the end of the others.
GUARD_LOOK_MS = 1_000
FLUSH_LIMIT_MS = 1_000  # how long the reader of relayed output may take for the rest after a kill
# The largest size of a pipe, unless root has changed it.
LARGEST_PIPE = 1024 * 1024
_OUR_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGCONT)


SUPERVISOR_NAME = "shotclock-sup"


class _Stage(Enum):
    RUNNING = auto()
    LINGERING = auto()
    STOPPING = auto()
    FLUSHING = auto()  # the rest of the output is being relayed
    GONE = auto()


class Supervisor:
    """The supervisor of one command or worker, in its own process."""

    def __init__(self, control: ipc.Socket, *, shares_group: bool = False) -> None:
        """`shares_group`: stay in the caller's session, and start the work in the caller's process group.

        The supervisor itself is in no group that can be killed at once with its caller, as by `kill -9 %1`.
        """
        self._control = control
        self._orders = ipc.ReaderWithDescriptors(control)
        self._caller_gone = False
        self._cgroup: Cgroup | None = None
        self._continuing = kernel.ContinuingTimer()
        self._start_afresh()
        # Handlers, not SIG_IGN, which exec would keep. Only signals ignored before, as by `nohup`, stay ignored for the
        # work.
        self._ignored = [number for number in _OUR_SIGNALS if signal.signal(number, lambda *_: None) is signal.SIG_IGN]
        # The caller of our caller may have blocked them. The work keeps that; we would not notice its end.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUR_SIGNALS)
        self._child_signal, _ = kernel.open_signal_pipe()
        self._caller_group = os.getpgrp() if shares_group else 0
        if shares_group:
            os.setpgid(0, 0)
            if signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN:
                self._ignored.append(signal.SIGTTOU)
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # output is relayed to the terminal, also from the background
        else:
            os.setsid()
        kernel.become_subreaper()
        kernel.name_process(SUPERVISOR_NAME)

    def _start_afresh(self, task: CommandTask | None = None) -> None:
        self._task = task or CommandTask([], {})
        self._runners = Runners(self._task.runners)
        self._stop_signal = signal.Signals[self._task.stop_signal]
        self._bell_fd = -1
        self._moved_bell_ns = 0
        self._stage = _Stage.RUNNING
        self._leader = -1
        self._group = -1
        self._start_fd = -1
        self._stays = False
        self._report = CommandReport()
        self._streams: list[OutputPipe] = []
        self._shown = ShownOutput() if self._task.shows_output else None
        self._last_sign_ns = monotonic_ns()
        self._started_ns = self._task.started_ns or self._last_sign_ns
        self._kill_ns: int | None = None
        self._ask_again_ns: int | None = None
        self._asks_again = False
        self._asked_with: int = signal.SIGTERM
        self._suspend_ns: int | None = None
        self._suspended = False
        self._wind_down_ns: int | None = None
        self._has_stop_file = False
        self._linger_ns: int | None = None
        self._input_watch: InputWatch | None = None
        self._leak_ns = 0
        self._files: set[tuple[int, int]] | None = None
        """Stdin and output of a command."""

    def run_command(self, task: CommandTask, handed: list[int] | None = None, *, stays: bool = False) -> None:
        """Run one command to its end and report. `handed` become its stdin and stdout; then only stderr is read here.

        With `Output.RELAY`, stdout and stderr are one pipe, which is relayed to the handed stdout. With `stays` this
        supervisor then waits for another command if nothing is left of this one.
        """
        self._start_afresh(task)
        self._stays = stays and not self._ignored
        if not task.leave_children:
            self._cgroup = Cgroup.create()
        is_relayed = bool(handed) and task.output == Output.RELAY.name
        becomes = self._join(task, handed or []) if is_relayed else self._pipes(task, handed or [])
        self._files = kernel.identify_files(becomes.get(number, number) for number in (0, 1, 2))
        self._start(lambda: become(task, becomes), execs=True)
        if task.input_ms:
            from .input_wait import InputWatch  # most commands run without this limit

            self._input_watch = InputWatch(task.input_ms, becomes.get(0, 0))
        kernel.replace_by_null(0, 1, 2)
        for fd in set(becomes.values()):  # the holders of the other ends must notice when the work closes its own
            os.close(fd)
        self._watch()

    def run_commands(self) -> None:
        """Run the commands of a blocking caller one after another. Its descriptors for each come with the task."""
        self._cgroup = Cgroup.create()
        self._stays = True
        kernel.replace_by_null(0, 1, 2)
        self._send((News.STARTED, -1, os.getpid()))
        while self.run_next_command():
            pass

    def run_next_command(self) -> bool:
        """Wait for another command and run it without a fork. Return False if the caller is gone.

        The zygote guards it as well, if this supervisor and its caller are killed at once.
        """
        if self._cgroup is not None and not self._cgroup.enter():
            self._cgroup.remove()
            self._cgroup = None
        task = self._next_task()
        if task is None:
            return False
        self._start_afresh(task)
        self._stays = True
        kernel.empty(self._child_signal)  # from the previous command, which has no process left
        handed = self._orders.take_descriptors()
        becomes = self._join(task, handed) if handed else self._pipes(task, [])
        self._files = kernel.identify_files(becomes.values())
        try:
            self._orders.drop(Order.MORE)  # of the command before
            if not self._orders.has_unread:  # otherwise it was called off; without a child, the loop ends
                self._continuing.arm(GUARD_LOOK_MS, LOOK_PAUSE_MS)
                self._leader = self._group = spawn(task, becomes)
                if task.announced:
                    self._announce()
        except StartFailed as failed:
            self._report.unstartable = (failed.step, failed.errno)
            self._stage = _Stage.GONE  # without a child, no signal would end a wait
        while self._orders.has_unread:
            self._obey(self._orders.next())
        for fd in set(becomes.values()):
            os.close(fd)
        self._watch()
        for stream in self._streams:
            if stream.relay_to >= 0:
                os.close(stream.relay_to)
        return True

    def _next_task(self) -> CommandTask | None:
        if self._caller_gone or not self._stays:
            return None
        # Unbounded on purpose: without a command there is nothing to end, and the caller's socket ends the wait.
        self._control.settimeout(None)
        try:
            while (message := self._orders.next())[0] == Order.MORE:  # of the command before
                pass
            return CommandTask(**message[0])
        except ipc.Broken:
            return None

    def _join(self, task: CommandTask, handed: list[int]) -> dict[int, int]:
        """Return the descriptors of the caller by their number in the command; without a third, stderr is stdout."""
        becomes = dict(enumerate(handed))
        if task.output == Output.RELAY.name:
            for number, relay_to in enumerate(handed[1:], 1):
                read_end, becomes[number] = os.pipe()
                self._streams.append(OutputPipe(read_end, None, relay_to))
        becomes.setdefault(2, becomes[1])
        return becomes

    def _pipes(self, task: CommandTask, handed: list[int]) -> dict[int, int]:
        """Make the output pipes. Return our descriptors by their number in the command."""
        output = Output[task.output]
        ends: list[int] = []
        if output is Output.RELAY and not handed:
            stdout, stderr = os.fstat(1), os.fstat(2)
            if os.path.samestat(stdout, stderr) and not stat.S_ISCHR(stdout.st_mode):
                # One pipe, as one file: the order of the two streams stays.
                read_end, write_end = os.pipe()
                self._streams.append(OutputPipe(read_end, None, os.dup(1)))
                return {1: write_end, 2: os.dup(write_end)}
        if output is not Output.INHERIT:
            for number, spill in ((1, task.spill_stdout), (2, task.spill_stderr)):
                if handed and number == 1:
                    continue
                read_end, write_end = os.pipe()
                capture = Capture(task.output_limit, spill) if output is Output.CAPTURE else None
                relay_to = os.dup(number) if output is Output.RELAY else -1
                self._streams.append(OutputPipe(read_end, capture, relay_to))
                if capture is not None and self._shown is not None:
                    self._streams[-1].shown = number, self._shown
                ends.append(write_end)
        return dict(zip((0, 1, 2) if handed else (1, 2), [*handed, *ends], strict=False))

    def run_worker(
        self,
        serve: Callable[[], None],
        *,
        bell_fd: int = -1,
        announce: bool = True,
        release: Callable[[], None] = lambda: None,
        leave_children: bool = False,
    ) -> None:
        """Run a function in a child. `release` closes what only the child needs, so that the caller notices its end."""
        self._bell_fd = bell_fd
        self._asks_again = True
        self._task.leave_children = leave_children
        self._start(serve, execs=False)
        release()
        if announce and self._stage is _Stage.RUNNING:
            self._announce()
        self._watch()

    def wait_for_next(self) -> list[int]:
        """Wait for another worker to run. Return its descriptors; none if the caller is gone.

        Only if nothing is left of the last worker: a survivor would be taken for a child of the next.
        """
        self._start_afresh()
        while not self._caller_gone and not kernel.has_children():
            try:
                # Unbounded on purpose, as above.
                self._control.settimeout(None)
                orders = self._orders.receive()
            except ipc.Broken:
                break
            # Earlier orders were for the last worker and came too late. None follows: the kernel ends a read at a
            # message with descriptors.
            if (Order.AGAIN,) in orders:
                return self._orders.take_descriptors()
        return []

    def _start(self, become: Callable[[], None], *, execs: bool) -> None:
        error_in = -1
        if execs:
            # Closed by a successful exec, or holding the error. It is polled, because a working directory or a binary
            # on a dead network mount hangs the child and must not hang us.
            self._start_fd, error_in = os.pipe()
            os.set_blocking(self._start_fd, False)
        me = os.getpid()
        self._continuing.arm(GUARD_LOOK_MS, LOOK_PAUSE_MS)
        # Until the child has its own handlers, a stop has to wait: ours would swallow it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OUR_SIGNALS)
        try:
            pid = os.fork() if self._cgroup is None else self._cgroup.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if execs:
                os.close(error_in)
                os.close(self._start_fd)
                self._start_fd = -1
            self._report.unstartable = ("fork", error.errno or 0)
            self._stage = _Stage.GONE
            return
        if pid == 0:
            try:
                kernel.die_with_parent(me)
                os.setpgid(0, self._caller_group)
                signal.set_wakeup_fd(-1)
                for number in (*_OUR_SIGNALS, *([signal.SIGTTOU] if self._caller_group else [])):
                    signal.signal(number, signal.SIG_IGN if number in self._ignored else signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                become()
            except StartFailed as failed:
                os.write(error_in, f"{failed.step} {failed.errno}".encode())
            except BaseException as error:
                if execs:
                    os.write(error_in, f"exec {getattr(error, 'errno', None) or errno.EINVAL}".encode())
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if execs:
            os.close(error_in)
        self._leader = pid
        if not self._caller_group:
            self._group = pid
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # in parent and child, so that an immediate stop finds the group

    def _read_start(self) -> None:
        if self._start_fd < 0:
            return
        try:
            answer = os.read(self._start_fd, 64)
        except BlockingIOError:
            return
        os.close(self._start_fd)
        self._start_fd = -1
        if answer:
            step, number = answer.decode().split()
            self._report.unstartable = (step, int(number))
        else:
            self._announce()

    def _announce(self) -> None:
        self._send((News.STARTED, self._group, os.getpid()))

    def _watch(self) -> None:
        while self._stage is not _Stage.GONE:
            self._poll_once()
            self._reap()
            self._check_limits()
            self._show_new_output()
        self._continuing.disarm()
        report = self._report
        if self._has_stop_file and self._task.stop_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._task.stop_file)
        # A survivor, or a child left behind, would be taken for a process of the next command.
        self._stays = self._stays and not kernel.has_children()
        if self._cgroup is not None and not self._stays:
            self._cgroup.remove()
        if self._caller_gone:
            return
        self._read_start()
        self._show_new_output(is_last=True)
        report.ended_ns = monotonic_ns()
        report.jobs = self._runners.jobs()
        if report.fired is None:
            report.elapsed_ns = report.ended_ns - self._started_ns
        captured = [stream.capture.finish() for stream in self._streams if stream.capture]
        if captured:
            *rest, report.stderr = captured
            report.stdout = rest[0] if rest else report.stdout
        report.unwritten = next((stream.trouble for stream in self._streams if stream.trouble), 0)
        report.spare_pid = os.getpid() if self._stays else 0
        caller = ipc.peer_pid(self._control) if kernel.LINUX else 0
        # The work may have stopped the caller. After Ctrl-Z only `fg` continues it. A program that is not stopped may
        # have a handler for SIGCONT.
        if caller and kernel.is_stopped(caller) and not kernel.is_suspended(caller):
            signal_process(caller, signal.SIGCONT)
        self._send((News.ENDED, report.pack()))

    def _poll_once(self) -> None:
        poller = select.poll()
        if not self._caller_gone:  # otherwise it would be ready at once, again and again
            poller.register(self._control, select.POLLIN)
        poller.register(self._child_signal, select.POLLIN)
        if self._start_fd >= 0:
            poller.register(self._start_fd, select.POLLIN)
        if self._bell_fd >= 0 and self._stage is _Stage.RUNNING and kernel.LINUX:
            poller.register(self._bell_fd, select.POLLIN)
        readers, writers = {}, {}
        for stream in self._streams:
            if stream.open and len(stream.held) < RELAY_HELD:
                poller.register(stream.fd, select.POLLIN)
                readers[stream.fd] = stream
            if stream.held:
                poller.register(stream.relay_to, select.POLLOUT)
                writers[stream.relay_to] = stream
        wait_ms = self._wait_ms()
        self._continuing.arm(wait_ms + LATE_BELL_MS, LOOK_PAUSE_MS)
        for fd, _ in poller.poll(wait_ms):
            if fd == self._control.fileno():
                self._handle_orders()
            elif fd == self._child_signal:
                kernel.empty(self._child_signal)
            elif fd in readers:
                if readers[fd].read():
                    self._last_sign_ns = readers[fd].last_ns = monotonic_ns()
            elif fd in writers:
                writers[fd].write()
            elif fd == self._bell_fd and has_rung(fd):
                if monotonic_ns() < self._moved_bell_ns:  # it was moved before the worker armed the original timeout
                    kernel.DeadlineTimer(self._bell_fd).arm(self._moved_bell_ns)
                else:
                    self._fire(ClockKind.TIMEOUT)
            elif fd == self._start_fd:
                self._read_start()

    def _wait_ms(self) -> int:
        alarms = [at_ns for at_ns, _ in self._alarms() if at_ns is not None]
        wait = -(-(min(alarms) - monotonic_ns()) // NS_PER_MS) if alarms else GUARD_LOOK_MS  # waking early would spin
        return max(0, min(GUARD_LOOK_MS, wait))

    def _alarms(self) -> list[tuple[int | None, Callable[[], None]]]:
        """Return the instants of this stage and what is done at each, the most important first."""
        task = self._task
        match self._stage:
            case _Stage.STOPPING:
                return [(self._kill_ns, self._kill), (self._ask_again_ns, self._ask_again)]
            case _Stage.FLUSHING:
                return [(self._linger_ns, self._close_silent_streams), (task.bell_ns, self._give_up_streams)]
        alarms: list[tuple[int | None, Callable[[], None]]] = [
            (task.bell_ns, lambda: self._fire(ClockKind.TIMEOUT)),
            (self._wind_down_ns, lambda: self._fire(ClockKind.SOFT)),
            (self._suspend_ns, self._suspend_rest),
        ]
        if self._stage is _Stage.LINGERING:
            return [*alarms, (self._linger_ns, self._stop_leaked)]
        if not self._suspended and self._wind_down_ns is None:  # otherwise it may be silent, and may wait
            idle_ns = self._last_sign_ns + task.idle_ms * NS_PER_MS
            alarms.append((idle_ns if task.idle_ms else None, lambda: self._fire(ClockKind.IDLE)))
            alarms.append((self._input_watch.look_ns if self._input_watch else None, self._look_for_input))
        return [*alarms, (task.soft_ns, lambda: self._wind_down(monotonic_ns() + task.wind_down_ms * NS_PER_MS))]

    def _check_limits(self) -> None:
        now_ns = monotonic_ns()
        if any(stream.held for stream in self._streams):
            self._last_sign_ns = now_ns  # the reader of our output is slow, but the work is not silent
        due = next((act for at_ns, act in self._alarms() if at_ns is not None and now_ns >= at_ns), None)
        if due is not None:
            due()
        if self._stage is _Stage.FLUSHING and not any(stream.busy for stream in self._streams):
            self._stage = _Stage.GONE

    def _look_for_input(self) -> None:
        if self._input_watch is None:
            return
        wanted = self._input_watch.look(self._unguarded(), self._streams, self._last_sign_ns)
        if wanted and self._task.tells_input:
            self._send((News.INPUT_WANTED, wanted))
        elif wanted:
            self._report.input_wanted = wanted
            self._fire(ClockKind.INPUT)

    @property
    def _is_active(self) -> bool:
        return self._stage is _Stage.RUNNING or self._stage is _Stage.LINGERING

    def _handle_orders(self) -> None:
        try:
            orders = self._orders.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            self._caller_gone = True
            self._reap()  # if the caller left because a zygote was killed, the supervisors it forked live on
            self._kill()
            return
        for order in orders:
            self._obey(order)

    def _obey(self, order: ipc.Message) -> None:
        match order:
            case (Order.STOP, str(why)):
                self._report.stopped = self._report.stopped or why
                number = signal.Signals.__members__.get(why, signal.SIGTERM)
                self._stop(signal.SIGTERM if self._asks_again else number)
            case (Order.RING,):
                self._fire(ClockKind.TIMEOUT)
            case (Order.WIND_DOWN, int(until_ns)):
                self._wind_down(until_ns)
            case (Order.BELL, int(bell_ns), int(kill_ns)) if self._is_active:
                if self._bell_fd >= 0:
                    self._moved_bell_ns = bell_ns
                    kernel.DeadlineTimer(self._bell_fd).arm(bell_ns)
                else:
                    self._task.bell_ns, self._task.kill_ns = bell_ns, kill_ns
            case (Order.LOOK,):
                ends = [stream.end() for stream in self._streams]
                *rest, stderr = [text for text, _ in ends] or [b""]
                self._send((News.LOOKED, rest[0] if rest else b"", stderr, sum(total for _, total in ends)))
            case (Order.MORE,) if self._shown is not None:
                self._shown.is_wanted = True
            case (Order.SIGNAL, str(number)) if self._is_active:
                self._forward(int(number))
            case (Order.SUSPEND,):
                self._suspend()
            case (Order.CONTINUE,):
                self._continue()
            case (Order.KILL, str(why)):
                self._report.stopped = self._report.stopped or why
                self._kill()
            case (Order.GRACE, int(grace_ms)):
                self._task.grace_ms = grace_ms

    def _reap(self) -> None:
        """Reap the dead. This process is the subreaper: without a child, or with only runners, no work is left."""
        if self._stage is _Stage.FLUSHING or self._stage is _Stage.GONE:
            return
        if kernel.collect_dead(self._record_end) or (self._leader < 0 and self._runners.are_alone()):
            self._begin_flushing()

    def _record_end(self, pid: int, status: int) -> None:
        if pid != self._leader:
            return
        self._leader = -1
        self._report.status = os.waitstatus_to_exitcode(status)
        now_ns = monotonic_ns()
        later_ns = now_ns + LEAK_GRACE_MS * NS_PER_MS
        if self._stage is _Stage.STOPPING and self._asked_with != signal.SIGTERM:
            self._ask_again_ns = later_ns  # children may ignore the signal, as a shell's background jobs ignore SIGINT
        elif self._stage is _Stage.RUNNING and self._task.leave_children:
            self._begin_flushing()
        elif self._stage is _Stage.RUNNING:
            self._stage, self._leak_ns = _Stage.LINGERING, later_ns
            self._linger_ns = later_ns if self._files is None else now_ns + LEAK_LOOK_MS * NS_PER_MS

    def _stop_leaked(self) -> None:
        left = [pid for pid in self._runners.list_others() if not kernel.is_zombie(pid)]
        files = self._files or set()
        if monotonic_ns() < self._leak_ns and any(kernel.holds_any(pid, files) for pid in left):
            self._linger_ns = self._leak_ns
            return
        self._linger_ns = None
        self._report.leaked = [kernel.describe(pid) for pid in left]
        self._begin_stopping(LEAK_STOP_GRACE_MS)
        for pid in left:
            signal_process(pid, signal.SIGTERM)
            signal_process(pid, signal.SIGCONT)

    def _begin_flushing(self) -> None:
        self._stage = _Stage.FLUSHING
        self._limit_flushing()
        # The tree has closed the pipes; only a foreign process that was handed them can keep them open.
        self._linger_ns = monotonic_ns() + LEAK_GRACE_MS * NS_PER_MS
        for stream in self._streams:
            is_kept_open = self._task.leave_children or bool(self._report.survivors)
            most = LARGEST_PIPE if is_kept_open else RELAY_HELD
            while stream.open and len(stream.held) < most and stream.read():
                if monotonic_ns() >= self._linger_ns:
                    break
            if is_kept_open:
                stream.close()

    @property
    def _is_cut_short(self) -> bool:
        return self._caller_gone or self._report.fired is not None or self._report.stopped is not None

    def _limit_flushing(self) -> None:
        """Limit the wait for the reader of the relay, if the work was cut short: its time is over as well."""
        if self._stage is _Stage.FLUSHING and self._is_cut_short:
            self._task.bell_ns = monotonic_ns() + FLUSH_LIMIT_MS * NS_PER_MS

    def _close_silent_streams(self) -> None:
        self._linger_ns = None
        for stream in self._streams:
            if not stream.held:
                stream.close()

    def _give_up_streams(self) -> None:
        if not self._is_cut_short and any(stream.held for stream in self._streams):
            self._record_fired(ClockKind.TIMEOUT)
        for stream in self._streams:
            stream.close()
            stream.held.clear()

    def _record_fired(self, kind: ClockKind) -> None:
        self._report.fired = kind.value
        self._report.elapsed_ns = monotonic_ns() - self._started_ns

    def _fire(self, kind: ClockKind) -> None:
        if self._is_active:
            self._record_fired(kind)
            self._stop(self._task.timeout_signal)

    def _stop(self, number: int) -> None:
        """Send the signal, and kill at the end of the grace."""
        if not self._is_active:
            self._limit_flushing()
            return
        self._begin_stopping(self._task.grace_ms)
        if not self._task.grace_ms or number == signal.SIGKILL:
            self._kill()
            return
        self._report_signal(number)
        self._ask(number)
        if self._asks_again:
            self._ask_again_ns = monotonic_ns() + TERM_AGAIN_MS * NS_PER_MS

    def _report_signal(self, number: int) -> None:
        if self._task.tells_signals:
            self._send((News.SIGNALLED, int(number)))

    def _ask(self, number: int) -> None:
        """Send the signal to all of the work, and CONT so that stopped processes receive it."""
        self._asked_with = number
        if self._suspended:
            self._continue()
        # Listed before and after: while its parent dies, an orphan on its way to us is in no listing.
        outside = self._outside_the_group()
        for each in (number, signal.SIGCONT):
            self._signal_group(each)
        for pid in {*outside, *self._outside_the_group()}:
            signal_process(pid, number)
            signal_process(pid, signal.SIGCONT)

    def _ask_again(self) -> None:
        self._ask_again_ns = None
        if self._asks_again and self._leader > 0:
            signal_process(self._leader, signal.SIGTERM)
            self._ask_again_ns = monotonic_ns() + TERM_AGAIN_MS * NS_PER_MS
        elif self._asked_with != signal.SIGTERM:
            self._ask(signal.SIGTERM)

    def _wind_down(self, until_ns: int) -> None:
        """Ask the work to end by itself. A second call can only shorten the time."""
        if not self._is_active:
            return
        if self._wind_down_ns is not None:
            self._wind_down_ns = min(self._wind_down_ns, until_ns)
            return
        self._task.soft_ns, self._wind_down_ns = None, until_ns
        self._report.soft_rang = True
        self._make_stop_file()
        self._forward(self._stop_signal)

    def _forward(self, number: int) -> None:
        """Send a signal to the process group of the command."""
        self._signal_group(number)
        if self._caller_group:
            for pid in self._outside_the_group():
                if group_of(pid) == self._caller_group:
                    signal_process(pid, number)

    def _make_stop_file(self) -> None:
        """Make the stop file. A pipe or a link in its place is neither opened nor followed."""
        if self._task.stop_file is None or self._has_stop_file:
            return
        self._has_stop_file = True
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # no place to write: there is still the signal
            make_private_directory(os.path.dirname(self._task.stop_file))
            os.close(os.open(self._task.stop_file, flags, 0o600))

    def _show_new_output(self, *, is_last: bool = False) -> None:
        if self._shown is not None and (self._shown.is_due or is_last):
            pieces, left_out = self._shown.take()
            if pieces or any(left_out):
                self._send((News.OUTPUT, pieces, left_out))

    def _suspend(self) -> None:
        """Stop the work for Ctrl-Z. Its timeout continues to run."""
        if self._is_active:
            self._suspended = True
            self._signal_group(signal.SIGTSTP)
            self._suspend_ns = monotonic_ns() + SUSPEND_GRACE_MS * NS_PER_MS
        else:
            self._send((News.SUSPENDED,))

    def _suspend_rest(self) -> None:
        """Send SIGSTOP until nothing below us runs: processes may fork meanwhile."""
        self._suspend_ns = None
        for _ in range(SUSPEND_SWEEPS):
            running = [pid for pid in self._runners.list_others() if not kernel.is_halted(pid)]
            if not running:
                break
            for pid in running:
                signal_process(pid, signal.SIGSTOP)
        self._send((News.SUSPENDED,))

    def _continue(self) -> None:
        self._suspended = False
        self._suspend_ns = None
        self._last_sign_ns = monotonic_ns()
        for pid in self._runners.list_others():
            signal_process(pid, signal.SIGCONT)

    def _outside_the_group(self) -> list[int]:
        """Return the descendants outside the work's own process group that no other supervisor guards."""
        return [pid for pid in self._unguarded() if group_of(pid) != self._group]

    def _unguarded(self) -> list[int]:
        """Return the descendants that no other supervisor guards."""
        below = self._runners.list_others()
        guarded: set[int] = set()
        for pid in below:
            # Until its exec our own child has our name.
            if pid != self._leader and pid not in guarded and kernel.name_of(pid) == SUPERVISOR_NAME:
                guarded.update((pid, *kernel.descendants(pid)))
        return [pid for pid in below if pid not in guarded]

    def _begin_stopping(self, grace_ms: int) -> None:
        self._stage = _Stage.STOPPING
        self._kill_ns = monotonic_ns() + grace_ms * NS_PER_MS
        if self._task.kill_ns is not None:
            self._kill_ns = min(self._kill_ns, self._task.kill_ns)

    def _signal_group(self, number: int) -> None:
        if self._group > 0:
            with contextlib.suppress(OSError):
                os.killpg(self._group, number)

    def _kill(self) -> None:
        if self._stage is _Stage.FLUSHING or self._stage is _Stage.GONE:
            self._limit_flushing()
            return
        self._stage = _Stage.STOPPING
        if self._cgroup is not None and not self._cgroup.inside:
            self._cgroup.kill()
        if self._leader > 0:  # its group is most of the work, and dies while we look for the rest
            self._report_signal(signal.SIGKILL)
            self._signal_group(signal.SIGKILL)
        left = kill_below(
            self._reap_until_gone,
            self._pause,
            find=self._runners.list_others,
            spared_group=self._caller_group,
            escalate=self._kill_from_outside,
        )
        if left:
            self._report.survivors = [kernel.describe(pid) for pid in left]
            self._begin_flushing()

    def _kill_from_outside(self) -> None:
        """Leave the cgroup and kill it. Leaving takes milliseconds, so this is not the first step."""
        if self._cgroup is not None and self._cgroup.leave():
            self._cgroup.kill()

    def _reap_until_gone(self) -> bool:
        self._reap()
        return self._stage is not _Stage.STOPPING

    def _pause(self, wait_ms: int) -> None:
        poller = select.poll()
        poller.register(self._child_signal, select.POLLIN)
        poller.poll(wait_ms)
        kernel.empty(self._child_signal)

    def _send(self, message: ipc.Message) -> None:
        if self._caller_gone:
            return
        self._control.settimeout(REPORT_LIMIT_S)
        try:
            ipc.send(self._control, message)
        except ipc.Broken:
            self._caller_gone = True
            self._kill()


def has_rung(bell_fd: int) -> bool:
    """Return whether the timer has really expired: the call may have ended and disarmed it meanwhile."""
    try:
        return len(os.read(bell_fd, 8)) == 8
    except OSError:
        return False
