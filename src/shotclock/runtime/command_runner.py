"""Commands run from an event loop: a supervisor runs each, the loop only waits for its report.

The zygote forks a supervisor where there is none to spare. One whose command is gone, with all it started, waits for
the next: that saves two forks, which cost more than most commands do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from ..core.clocks import NS_PER_MS, ClockKind
from ..process import call_processes, ipc, kernel
from ..process.clock import monotonic_ns
from ..process.command_task import CommandReport, CommandTask, News, Order
from ..process.kill import VERIFY_LIMIT_MS, signal_process
from ..process.supervisor import LATE_BELL_MS, LOOK_PAUSE_MS, SILENT_LIMIT_MS, SUPERVISOR_NAME
from ..process.zygote import COMMAND, kill_what_lost_its_supervisor
from .call import Call, Work, WorkView

# Past the kill and its verification: a supervisor that has not reported by then is broken or was stopped.
REPORT_MARGIN_MS = 2_000
# Past the bell: one that has not even said that its command started hangs in starting it. Dead network mounts do that.
START_MARGIN_MS = 250
# Between two tries to reach a zygote that is behind; it forks a supervisor in about a millisecond.
BEHIND_PAUSE_S = 0.005
# How long a cancelled command that has not been reported as started is waited for.
CALL_OFF_S = 0.5
# How long closing waits for the commands it kills: a kill and its verification.
STOP_ALL_S = 3.0
# Supervisors kept for later commands. Each is a small process; more than these seldom run at once for long.
MOST_SPARE = 8

RequestFork = Callable[[bytes, list[int]], None]


class Patience:
    """Wait for a supervisor that has to end its work. One that somebody has stopped is told to go on, and killed if it
    stays stopped or says nothing; its zygote then kills what it guarded."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, supervisor: int, grace_ms: int, on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._on_end = on_end
        self.ends_at = loop.time() + (grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000
        self._silent_at = loop.time() + (grace_ms + SILENT_LIMIT_MS) / 1000
        self._timer = loop.call_later(LOOK_PAUSE_MS / 1000, self._look)
        signal_supervisor(supervisor, signal.SIGCONT)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self.ends_at:
            signal_supervisor(self._supervisor, signal.SIGKILL)
            self._on_end()
            return
        if kernel.is_stopped(self._supervisor):
            signal_supervisor(self._supervisor, signal.SIGCONT if now < self._silent_at else signal.SIGKILL)
        self._timer = self._loop.call_later(LOOK_PAUSE_MS / 1000, self._look)


def signal_supervisor(pid: int, number: int) -> None:
    """Send a signal to a supervisor, if it is known, and still one."""
    if pid and kernel.name_of(pid) == SUPERVISOR_NAME:
        signal_process(pid, number)


class RunningCommand:
    """A supervisor, seen from the loop that waits for what it runs."""

    __slots__ = (
        "_inbox",
        "control",
        "ended",
        "looking",
        "loop",
        "lost",
        "ordered",
        "pid",
        "started",
        "stopped",
        "supervisor",
        "waiting_orders",
    )

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self.control = control
        self.lost = False
        self.pid = 0
        """Its own, once it has said that it can be used again."""
        self.supervisor = 0
        """The same, as soon as it has said anything."""
        self._inbox = ipc.MessageReader(control)
        self.loop = asyncio.get_running_loop()
        self.looking: list[asyncio.Future[WorkView]] = []
        """Those who wait to see what the command has written so far."""
        self.begin()
        self.loop.add_reader(control, self._receive)

    def begin(self) -> None:
        """Forget the command before: nothing is known of one yet."""
        self.started = False
        self.ordered = False
        self.stopped: str | None = None
        """Why it was told to end, where its supervisor does not come to say so."""
        self.waiting_orders: list[tuple[str, int] | tuple[str, int, int]] = []
        self.ended: asyncio.Future[CommandReport] = self.loop.create_future()

    async def send_task(self, task: CommandTask) -> None:
        """Send the task. Raises TaskNotSent where there is nobody."""
        frame = ipc.frame((task.pack(),))
        try:
            sent = self.control.send(frame)
            if sent < len(frame):
                await self.loop.sock_sendall(self.control, frame[sent:])
        except OSError as error:
            raise TaskNotSent(*error.args) from error

    def order(self, order: str, *details: object) -> None:
        self.ordered = True
        if order in (Order.STOP, Order.KILL):
            self.stopped = self.stopped or str(details[0])
        with contextlib.suppress(ipc.Broken, BlockingIOError):
            ipc.send(self.control, (order, *details))
        signal_supervisor(self.supervisor, signal.SIGCONT)

    def order_once_started(self, *order: Any) -> None:
        """Send an order about a command that runs. One that comes before its start would be taken for its end."""
        if self.started:
            self.order(*order)
        else:
            self.waiting_orders.append(order)

    def close(self) -> None:
        """Close its socket. If anything is still there, its supervisor now kills it."""
        self.loop.remove_reader(self.control)
        self.loop.remove_writer(self.control)  # or its number, soon somebody else's, would still be waited for
        self.control.close()

    def make_go_on(self) -> None:
        """Continue it: if somebody has stopped it, it has not heard the bell. One that has not begun must not begin
        now."""
        if self.started:
            signal_supervisor(self.supervisor, signal.SIGCONT)

    def give_up(self) -> None:
        self.lost = True
        self.end(CommandReport(lost=True, stopped=self.stopped))

    def end(self, report: CommandReport) -> None:
        if not self.ended.done():
            self.ended.set_result(report)

    def give_up_starting(self, task: CommandTask) -> None:
        """Give up, at its bell, a command whose start was never reported. Its zygote kills whatever there is of it."""
        if self.pid and not self.started and not self.ended.done():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self.end(CommandReport(fired=ClockKind.TIMEOUT.value, elapsed_ns=monotonic_ns() - task.started_ns))

    def _receive(self) -> None:
        try:
            messages = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken as broken:
            self.lost = True
            self.loop.remove_reader(self.control)
            # What it did not read is the task only where it has not started that, and was sent nothing else.
            is_unread = isinstance(broken.__cause__, ConnectionResetError) and not self.started and not self.ordered
            if is_unread and not self.ended.done():
                self.ended.set_exception(TaskNotSent("killed before it read what it was sent"))
                self.ended.exception()  # whoever was cancelled meanwhile does not ask for it
            self.end(CommandReport(lost=True, stopped=self.stopped))
            return
        for message in messages:
            if message[0] == News.STARTED:
                self.started = True
                self.supervisor = message[2]
                orders, self.waiting_orders = self.waiting_orders, []
                for order in orders:
                    self.order(*order)
            elif message[0] == News.LOOKED:
                for looking in self.looking:
                    if not looking.done():
                        looking.set_result(WorkView(_text(message[1]), _text(message[2]), message[3]))
                self.looking.clear()
            elif message[0] == News.ENDED:
                report = CommandReport.unpack(message[1])
                self.pid = self.supervisor = report.spare_pid
                self.end(report)


def _text(written: bytes) -> str:
    return written.decode(errors="replace")


class CommandWork(Work):
    """A command that runs for a call. Its supervisor ends it, also where it was asked to wind down."""

    __slots__ = ("_call", "_running", "_supervisors", "_task", "alarms")

    def __init__(self, supervisors: Supervisors, running: RunningCommand, task: CommandTask, call: Call) -> None:
        self._supervisors, self._running, self._task, self._call = supervisors, running, task, call
        self.alarms = supervisors.watch(running, task)
        if call.bound.bell is not None and call.bound.bell.at_ns != task.bell_ns:  # extended since it was sent
            self.move_bell()
        if call.winding_down is not None:
            self.wind_down(call.winding_down.until_ns)

    def wind_down(self, until_ns: int) -> None:
        self._running.order_once_started(Order.WIND_DOWN, until_ns)

    def kill(self) -> None:
        self._running.order(Order.KILL, "cut off")

    def move_bell(self) -> bool:
        bound = self._call.bound
        if self._running.ended.done() or bound.bell is None or bound.kill_ns is None:
            return False
        self._task.bell_ns, self._task.kill_ns = bound.bell.at_ns, bound.kill_ns
        self._running.order_once_started(Order.BELL, bound.bell.at_ns, bound.kill_ns)
        self.cancel_alarms()
        self.alarms = self._supervisors.watch(self._running, self._task)
        return True

    async def look(self) -> WorkView:
        if not self._running.started:
            return WorkView(has_begun=False)
        looking: asyncio.Future[WorkView] = self._running.loop.create_future()
        self._running.looking.append(looking)
        self._running.order(Order.LOOK)
        return await looking  # bounded by whoever looks

    def cancel_alarms(self) -> None:
        for alarm in self.alarms:
            alarm.cancel()


class TaskNotSent(OSError):
    """No supervisor took the task."""


class Supervisors:
    """Supervisors of one runtime: what they run now, and the ones to spare."""

    def __init__(self, request_fork: RequestFork) -> None:
        self._request_fork = request_fork
        self.running: set[RunningCommand] = set()
        self._spare: list[RunningCommand] = []
        self._closing = False

    async def run(self, task: CommandTask, call: Call) -> CommandReport:
        """Run the command of a call to its end. Cancelling this stops the command first. Nothing survives but what is
        reported."""
        for _ in range(len(self._spare) + 1):
            with contextlib.suppress(
                TaskNotSent
            ):  # it was killed before it read that, or its zygote was; nothing began
                return await self._run_once(task, call)
        return await self._run_once(task, call)

    async def begin(self, task: CommandTask, fds: list[int]) -> RunningCommand:
        """Give a task to a fresh supervisor. Of the work's own stdin and stdout, the ends are in `fds`."""
        control, theirs = socket.socketpair()
        running = RunningCommand(control)
        try:
            with theirs:
                await self._request([theirs.fileno(), *fds], task)
            await running.send_task(task)
        except BaseException:
            running.close()
            raise
        return running

    async def stop_all(self) -> None:
        """Kill every command and wait, bounded, for the reports."""
        self._closing = True
        self.dismiss()
        for running in list(self.running):
            running.order(Order.KILL, "closing")
        if self.running:
            await asyncio.wait([running.ended for running in self.running], timeout=STOP_ALL_S)

    def register(self, running: RunningCommand) -> None:
        """Count in one that has its task. Where everybody was told to stop meanwhile, it has not heard that."""
        self.running.add(running)
        if self._closing:
            running.order(Order.KILL, "closing")

    def dismiss(self) -> None:
        """Close those who wait for something to do."""
        while self._spare:
            self._spare.pop().close()

    async def _run_once(self, task: CommandTask, call: Call) -> CommandReport:
        running = self._take_spare()
        if running is None:
            running = await self.begin(task, [])
        else:
            try:
                await running.send_task(task)
            except BaseException:
                running.close()
                raise
        self.register(running)
        work = call.work = CommandWork(self, running, task, call)
        try:
            report = await asyncio.shield(running.ended)
            if report.lost:
                await self._look_for_survivors(running, task, report)
            return report
        except asyncio.CancelledError as cancelled:
            running.order(Order.STOP, "cancelled")
            if running.supervisor:
                work.alarms.append(Patience(running.loop, running.supervisor, task.grace_ms, running.give_up))
            # What has not started is called off by that, and there is nothing to wait for.
            there = running.started or running.pid
            stop_s = (task.grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000 if there else CALL_OFF_S
            await run_shielded(asyncio.wait([running.ended], timeout=stop_s))
            if running.ended.done() and running.ended.exception() is None:
                # Not an exception of its own: `asyncio.timeout` knows a cancellation by its very class.
                cancelled.report = running.ended.result()  # type: ignore[attr-defined]
            raise
        finally:
            work.cancel_alarms()
            self.running.discard(running)
            self._give_back(running)

    async def _look_for_survivors(self, running: RunningCommand, task: CommandTask, report: CommandReport) -> None:
        """Find what survives, where its supervisor was killed and can no longer tell. What it guarded is killed by its
        zygote."""
        looked: asyncio.Future[call_processes.Survivors] = running.loop.create_future()
        call_processes.run_beside(
            running.loop, partial(kill_what_lost_its_supervisor, running.supervisor), looked.set_result
        )
        await run_shielded(asyncio.wait([looked]))
        report.survivors = list(looked.result())
        now_ns = monotonic_ns()
        if task.bell_ns is not None and now_ns >= task.bell_ns:
            report.fired, report.elapsed_ns = ClockKind.TIMEOUT.value, now_ns - task.started_ns

    def watch(self, running: RunningCommand, task: CommandTask) -> list[asyncio.TimerHandle | Patience]:
        """Set the timers that end the waiting where the supervisor does not."""
        alarms: list[asyncio.TimerHandle | Patience] = []
        loop, now_ns = asyncio.get_running_loop(), monotonic_ns()

        def lose_patience() -> None:
            alarms.append(Patience(loop, running.supervisor if running.started else 0, 0, running.give_up))

        if task.kill_ns is not None:
            alarms.append(loop.call_later(max(0.0, (task.kill_ns - now_ns) / 1e9), lose_patience))
        if task.bell_ns is not None:
            late_s = max(0.0, (task.bell_ns - now_ns) / 1e9 + LATE_BELL_MS / 1000)
            alarms.append(loop.call_later(late_s, running.make_go_on))
        if task.bell_ns is not None and running.pid:
            late_ns = task.bell_ns - now_ns + START_MARGIN_MS * NS_PER_MS
            alarms.append(loop.call_later(max(0.0, late_ns / 1e9), running.give_up_starting, task))
        return alarms

    def _take_spare(self) -> RunningCommand | None:
        while self._spare:
            running = self._spare.pop()
            if not running.lost:
                running.begin()
                return running
            running.close()
        return None

    def _give_back(self, running: RunningCommand) -> None:
        # An order that came too late would be taken for one about the next command.
        can_be_used = running.pid and running.ended.done() and not running.ordered and not running.lost
        if can_be_used and len(self._spare) < MOST_SPARE:
            self._spare.append(running)
        else:
            running.close()

    async def _request(self, fds: list[int], task: CommandTask) -> None:
        """Ask for a supervisor. The first descriptor is its control."""
        while True:
            try:
                self._request_fork(COMMAND, fds)
                return
            except BlockingIOError:  # hundreds at once: the zygote is behind
                if task.bell_ns is not None and monotonic_ns() >= task.bell_ns:
                    raise
                await asyncio.sleep(BEHIND_PAUSE_S)


async def run_shielded(waiting: Coroutine[Any, Any, object]) -> None:
    """Finish a bounded clean-up even if the cancellation is repeated while it runs."""
    task = asyncio.ensure_future(waiting)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


# --- a command that is talked with ---------------------------------------------------------------------


# What a process may take to leave by itself once its stdin has ended; one that does not listen is told by TERM.
LEAVE_LIMIT_S = 0.5
# And then until the kill: it has answered, nobody waits for what it still does.
LEAVE_GRACE_MS = 500
CHUNK = 64 * 1024


class InteractiveProcess:
    """A running process. `read` and `write` are bounded by whoever calls them, and end when the process does."""

    def __init__(self, running: RunningCommand, task: CommandTask, stdin: int, stdout: int) -> None:
        self._running = running
        self.task = task
        self._stdin, self._stdout = stdin, stdout
        self._waits: set[asyncio.Future[None]] = set()
        self.report: CommandReport | None = None
        """How it ended, once it has."""
        for fd in (stdin, stdout):
            os.set_blocking(fd, False)
        running.ended.add_done_callback(self._has_ended)

    @property
    def ended(self) -> asyncio.Future[CommandReport]:
        return self._running.ended

    async def read(self) -> bytes:
        """Return what it has written to its stdout; nothing at the end."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # one that never stops writing must not keep the loop for itself
        while self._stdout >= 0:
            try:
                return os.read(self._stdout, CHUNK)
            except BlockingIOError:
                await self._until(loop.add_reader, loop.remove_reader, self._stdout)
            except OSError:
                break
        return b""

    async def write(self, data: bytes) -> None:
        """Write to its stdin. Raises BrokenPipeError if it does not take any more."""
        loop = asyncio.get_running_loop()
        left = memoryview(data)
        while left:
            if self._stdin < 0:
                raise BrokenPipeError("closed")
            try:
                left = left[os.write(self._stdin, left[:CHUNK]) :]
            except BlockingIOError:
                await self._until(loop.add_writer, loop.remove_writer, self._stdin)
            except OSError as error:
                raise BrokenPipeError(str(error)) from error

    async def close(self, *, politely: bool) -> None:
        """End it. Nothing of it is left after this but what its report calls survivors.

        Politely: its stdin ends, and it may leave by itself. Otherwise it is stopped at once, with its own grace.
        """
        self.end_stdin()
        grace_ms = self.task.grace_ms
        if politely:
            await asyncio.wait([self.ended], timeout=LEAVE_LIMIT_S)
            grace_ms = min(grace_ms, LEAVE_GRACE_MS)
        if not self.ended.done():
            self._running.order(Order.GRACE, grace_ms)
            self._running.order(Order.STOP, "closed")
            await asyncio.wait([self.ended], timeout=(grace_ms + VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000)
        if self.report is None:
            self.report = CommandReport()

    def move_bell(self, bell_ns: int, kill_ns: int) -> None:
        """Let it run until another bell."""
        self._running.order_once_started(Order.BELL, bell_ns, kill_ns)

    def end_stdin(self) -> None:
        loop = asyncio.get_running_loop()
        if self._stdin >= 0:
            loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
        self._wake()

    def let_go(self) -> None:
        """Close the descriptors. If anything is still there, its supervisor now kills it."""
        loop = asyncio.get_running_loop()
        self.end_stdin()
        if self._stdout >= 0:
            loop.remove_reader(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
        self._running.close()
        self._wake()

    async def _until(self, add: Callable[..., None], remove: Callable[[int], bool], fd: int) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(ready)
        add(fd, _set, ready)
        try:
            await ready
        finally:
            self._waits.discard(ready)
            if fd in (self._stdin, self._stdout):  # otherwise it was closed, and its number may be somebody else's
                remove(fd)

    def _wake(self) -> None:
        for ready in self._waits:
            _set(ready)

    def _has_ended(self, ended: asyncio.Future[CommandReport]) -> None:
        if not ended.cancelled():
            self.report = ended.result() if ended.exception() is None else CommandReport()


@contextlib.asynccontextmanager
async def open_command(supervisors: Supervisors, task: CommandTask) -> AsyncIterator[InteractiveProcess]:
    """Start a command, and have it gone again, with all it started, when this is left. Raises OSError or ipc.Broken.

    Left by an exception (a cancellation as well) it is stopped at once, otherwise it may leave by itself.
    """
    try:
        opened = await _open_once(supervisors, task)
    except TaskNotSent:  # its zygote was killed with the request in its hands; nothing began
        opened = await _open_once(supervisors, task)
    supervisors.register(opened._running)
    try:
        try:
            yield opened
        except BaseException:
            await run_shielded(opened.close(politely=False))
            raise
        await _let_leave(opened)
    finally:
        supervisors.running.discard(opened._running)
        opened.let_go()


async def _let_leave(opened: InteractiveProcess) -> None:
    """Wait until it leaves by itself. A cancellation meanwhile ends the patience, not the care."""
    closing = asyncio.ensure_future(opened.close(politely=True))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        opened._running.order(Order.KILL, "closed")
        await run_shielded(asyncio.wait([closing], timeout=(VERIFY_LIMIT_MS + REPORT_MARGIN_MS) / 1000))
        raise


async def _open_once(supervisors: Supervisors, task: CommandTask) -> InteractiveProcess:
    their_stdin, stdin = os.pipe()
    fds = [their_stdin, stdin]
    try:
        stdout, their_stdout = os.pipe()
        fds += (stdout, their_stdout)
        running = await supervisors.begin(task, [their_stdin, their_stdout])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    os.close(their_stdin)
    os.close(their_stdout)
    return InteractiveProcess(running, task, stdin, stdout)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
