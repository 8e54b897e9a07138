"""Commands run from an event loop. A supervisor runs many in turn: two forks cost more than most commands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from ..core.errors import Ending
from ..supervise import foreground, ipc, kernel
from ..supervise.client import LAST_WORD_MS, REPORT_LIMIT_MS, Fate, Spares, SupervisorClient
from ..supervise.clock import monotonic_ns
from ..supervise.command_task import CommandReport, CommandTask, News, Order
from ..supervise.kill import signal_process
from ..supervise.supervisor import SUPERVISOR_NAME
from ..supervise.zygote import COMMAND, kill_what_lost_its_supervisor
from ..worker.context import Survivors, run_beside
from .call import Call, Work, WorkView
from .control import LONGEST_DELAY_S, Observe, live_calls, start_control

# Between two attempts to reach a busy zygote, which forks in about a millisecond.
BEHIND_PAUSE_S = 0.005
CALL_OFF_S = 0.5  # how long to wait for a cancelled command that was not reported as started
# How long closing waits for the commands it kills: a kill and its verification.
STOP_ALL_S = 3.0

SHOW_PAUSE_S = 0.1  # between two pieces of output that are shown: a flood costs the caller little

T = TypeVar("T")
RequestFork = Callable[[bytes, list[int]], None]
OnOutput = Callable[[Sequence[tuple[int, bytes]], Sequence[int]], None]
"""Takes pieces of output with their stream, 1 or 2, and the bytes of each stream that were left out before them."""


class ClientTimer:
    """The client of a supervisor on an event loop: it gets the time, and its orders are sent."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: SupervisorClient,
        send: Callable[..., None],
        on_end: Callable[[], None],
    ) -> None:
        self.client = client
        self._loop = loop
        self._send = send
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self.update()

    def order(self, kind: str, *details: object, report_within_ms: int = REPORT_LIMIT_MS) -> None:
        self.client.order(monotonic_ns(), kind, *details, report_within_ms=report_within_ms)
        self.update()

    def update(self) -> None:
        """Send the client's orders, and wait for its next instant or report its end."""
        for order in self.client.take_orders():
            self._send(*order)
        self.cancel()
        if self.client.fate is not None:
            self._on_end()
        elif (at_ns := self.client.next_ns) is not None:
            delay_s = min(LONGEST_DELAY_S, max(0, at_ns - monotonic_ns()) / 1e9)
            self._timer = self._loop.call_later(delay_s, self._tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        client, now_ns = self.client, monotonic_ns()
        if client.tick(now_ns, is_stopped=client.is_look_due(now_ns) and kernel.is_stopped(client.pid)):
            signal_supervisor(client.pid, signal.SIGCONT)
        elif client.fate is Fate.LOST:
            signal_supervisor(client.pid, signal.SIGKILL)  # then its zygote kills the processes that it guarded
        self.update()


def signal_supervisor(pid: int, number: int) -> None:
    """Send a signal to a supervisor, if the pid is still that of one."""
    if pid and kernel.name_of(pid) == SUPERVISOR_NAME:
        signal_process(pid, number)


class TaskNotSent(OSError):
    """No supervisor received the task, so nothing was started."""


class RunningCommand:
    """A supervisor on an event loop, with the command that it runs."""

    def __init__(self, control: socket.socket | ipc.Socket, client: SupervisorClient) -> None:
        control.setblocking(False)
        self.control = control
        self.is_broken: bool = False
        self._inbox = ipc.MessageReader(control)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.looking: list[asyncio.Future[WorkView]] = []
        self.on_suspended: Callable[[], None] = lambda: None
        self.on_input_wanted: Callable[[dict[str, object]], None] = lambda wanted: None
        self.on_output: OnOutput | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._begin(client)
        self.loop.add_reader(control, self._receive)

    def _begin(self, client: SupervisorClient) -> None:
        self.client = client
        self.ended: asyncio.Future[None] = self.loop.create_future()
        """Done when the client knows the fate of the supervisor."""
        self._timer = ClientTimer(self.loop, client, self._send, self.end)

    def begin(self, task: CommandTask) -> None:
        """Take another command."""
        self._begin(SupervisorClient(task, self.client.pid, starts_itself=True))

    async def send_task(self) -> None:
        frame = ipc.frame((self.client.task.pack(),))
        try:
            sent = self.control.send(frame)
            if sent < len(frame):
                await self.loop.sock_sendall(self.control, frame[sent:])  # type: ignore[arg-type]
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise TaskNotSent(*error.args) from error
            raise

    def order(self, kind: str, *details: object, report_within_ms: int = REPORT_LIMIT_MS) -> None:
        self._timer.order(kind, *details, report_within_ms=report_within_ms)

    def order_once_started(self, *order: object) -> None:
        self.client.order_once_started(monotonic_ns(), *order)
        self._timer.update()

    def move_bell(self, bell_ns: int, kill_ns: int) -> None:
        self.client.move_bell(monotonic_ns(), bell_ns, kill_ns)
        self._timer.update()

    def _send(self, *message: object) -> None:
        with contextlib.suppress(ipc.Broken, BlockingIOError):
            ipc.send(self.control, message)

    def show_to(self, on_output: OnOutput | None) -> None:
        """Pass the output on while the command runs; None: no longer."""
        self.on_output = on_output
        if on_output is None and self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _ask_for_more(self) -> None:
        self._asking = None
        if not self.ended.done():  # not an order: it changes nothing for the command after this one
            self._send(Order.MORE)

    @property
    def is_reusable(self) -> bool:
        return self.client.is_reusable and not self.is_broken

    def close(self) -> None:
        """Close the socket. The supervisor then kills the rest."""
        self.show_to(None)
        self._timer.cancel()
        self.loop.remove_reader(self.control)
        self.loop.remove_writer(self.control)  # its number may soon belong to another file
        self.control.close()

    def give_up(self) -> None:
        self.client.give_up()
        self._timer.update()

    def end(self) -> None:
        _set_result(self.ended, None)

    def _receive(self) -> None:
        try:
            messages = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken as broken:
            self.loop.remove_reader(self.control)
            self.is_broken = True
            self.client.end_of_socket(is_task_unread=isinstance(broken.__cause__, ConnectionResetError))
            self._timer.update()
            return
        for message in messages:
            self.client.receive(monotonic_ns(), message)
            self._handle(message)
        self._timer.update()

    def _handle(self, message: ipc.Message) -> None:
        match message:
            case (News.LOOKED, stdout, stderr, written):
                view = WorkView(stdout.decode(errors="replace"), stderr.decode(errors="replace"), written)
                for looking in self.looking:
                    _set_result(looking, view)
                self.looking.clear()
            case (News.OUTPUT, pieces, left_out):
                if self.on_output is not None:
                    self.on_output(pieces, left_out)
                    if self._asking is not None:  # the last output of a command comes without being asked for
                        self._asking.cancel()
                    self._asking = self.loop.call_later(SHOW_PAUSE_S, self._ask_for_more)
            case (News.SUSPENDED,):
                self.on_suspended()
            case (News.INPUT_WANTED, wanted):
                self.on_input_wanted(wanted)


class CommandWork(Work):
    """The command of a call. Its supervisor ends it, also after an order to wind down."""

    has_grace = True

    def __init__(self, running: RunningCommand, call: Call) -> None:
        self._running, self._call = running, call
        self.report: CommandReport | None = None
        """Of a cancelled command."""
        # Extended since the task was made.
        if call.bound.bell is not None and call.bound.bell.at_ns != running.client.task.bell_ns:
            self.move_bell()
        if call.winding_down is not None:
            self.wind_down(call.winding_down.until_ns)

    def wind_down(self, until_ns: int) -> None:
        if self._call.bound.grace_ms < self._running.client.task.grace_ms:
            self._running.order_once_started(Order.GRACE, self._call.bound.grace_ms)
        self._running.order_once_started(Order.WIND_DOWN, until_ns)

    def kill(self) -> None:
        self._running.order(Order.KILL, "cut off")

    def move_bell(self) -> bool:
        bound = self._call.bound
        if self._running.ended.done() or bound.bell is None or bound.kill_ns is None:
            return False
        self._running.move_bell(bound.bell.at_ns, bound.kill_ns)
        return True

    async def look(self) -> WorkView:
        if not self._running.client.has_started:
            return WorkView(has_begun=False)
        looking: asyncio.Future[WorkView] = self._running.loop.create_future()
        self._running.looking.append(looking)
        self._running.order(Order.LOOK)
        return await looking  # bounded by the caller


class Supervisors:
    """The spare and busy supervisors of one runtime."""

    def __init__(self, request_fork: RequestFork) -> None:
        self._request_fork = request_fork
        self.running: set[RunningCommand] = set()
        self._spare: Spares[RunningCommand] = Spares()
        self._closing = False

    async def run(self, task: CommandTask, call: Call, on_output: OnOutput | None = None) -> CommandReport:
        """Run the command of a call to its end. A cancellation stops it first, and leaves the report in its work."""
        task.shows_output = on_output is not None
        for _ in range(len(self._spare.list()) + 1):
            with contextlib.suppress(TaskNotSent):  # the supervisor or its zygote was killed; nothing began
                return await self._run_once(task, call, on_output)
        return await self._run_once(task, call, on_output)

    async def begin(self, task: CommandTask, fds: list[int], on_output: OnOutput | None = None) -> RunningCommand:
        control, theirs = socket.socketpair()
        try:
            with theirs:
                await self._request([theirs.fileno(), *fds], task)
        except BaseException:
            control.close()
            raise
        running = RunningCommand(control, SupervisorClient(task))
        running.show_to(on_output)
        await running.send_task()
        return running

    async def stop_all(self) -> None:
        self._closing = True
        self.dismiss()
        for running in list(self.running):
            running.order(Order.KILL, "closing")
        if self.running:
            await asyncio.wait([running.ended for running in self.running], timeout=STOP_ALL_S)

    def register(self, running: RunningCommand) -> None:
        """Add a supervisor that has its task, which a `stop_all` meanwhile did not reach."""
        self.running.add(running)
        if self._closing:
            running.order(Order.KILL, "closing")

    def dismiss(self) -> None:
        while (spare := self._spare.take()) is not None:
            spare.close()

    async def _run_once(self, task: CommandTask, call: Call, on_output: OnOutput | None) -> CommandReport:
        running = self._take_spare()
        if running is None:
            running = await self.begin(task, [], on_output)
        else:
            running.begin(task)
            running.show_to(on_output)
            await running.send_task()
        self.register(running)
        work = CommandWork(running, call)
        call.work = work
        call.cancellation.ending = Ending.ABANDONED  # until its end is seen
        ending = asyncio.ensure_future(_wait_for_end(running))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await run_shielded(_stop(running, ending))
            if ending.done() and ending.exception() is None:
                work.report = ending.result()
            elif ending.done():
                call.cancellation.ending = Ending.NOT_STARTED
            raise
        finally:
            ending.cancel()
            running.show_to(None)
            self.running.discard(running)
            self._spare.give_back(running)

    def _take_spare(self) -> RunningCommand | None:
        while (running := self._spare.take()) is not None:
            if not running.is_broken:
                return running
            running.close()
        return None

    async def _request(self, fds: list[int], task: CommandTask) -> None:
        while True:
            try:
                self._request_fork(COMMAND, fds)
                return
            except BlockingIOError:  # hundreds at once: the zygote is behind
                if task.bell_ns is not None and monotonic_ns() >= task.bell_ns:
                    raise
                await asyncio.sleep(BEHIND_PAUSE_S)


async def _wait_for_end(running: RunningCommand) -> CommandReport:
    """Return the report of a supervisor, or the result of the search for its processes if it was lost."""
    await running.ended  # bounded by the client's own limits
    client = running.client
    if client.fate is Fate.UNSENT:
        raise TaskNotSent("killed before it read the task")
    if client.report is not None:
        return client.report
    looked: asyncio.Future[Survivors] = running.loop.create_future()
    run_beside(running.loop, partial(kill_what_lost_its_supervisor, client.pid), partial(_set_result, looked))
    return client.replace_report(monotonic_ns(), list(await looked))


async def _stop(running: RunningCommand, ending: asyncio.Future[CommandReport]) -> None:
    """Stop a command. One that has not started is called off by the order, and then there is no end to wait for."""
    running.order(Order.STOP, "cancelled")
    if not running.client.pid:
        await asyncio.wait([ending], timeout=CALL_OFF_S)
    if running.client.pid or running.ended.done():
        await asyncio.wait([ending])  # bounded by the client's own limits


async def run_shielded(waiting: Coroutine[Any, Any, object]) -> None:
    """Finish a bounded clean-up, even if the caller is cancelled meanwhile.

    A repeated cancellation is dropped. A first one is raised by the next await of the caller, or ends its task.
    """
    caller, task = asyncio.current_task(), asyncio.ensure_future(waiting)
    is_first = caller is not None and not caller.cancelling()
    try:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(task)
    finally:
        if caller is not None and is_first and caller.cancelling():
            caller.uncancel()  # or `asyncio.timeout` would count it twice
            caller.cancel()


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run bounded work in a thread to its end. A cancellation meanwhile is passed on afterwards."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await run_shielded(asyncio.wait([working]))
        raise


async def run_in_foreground(
    task: CommandTask, call: Call, signals: foreground.TerminalSignals, observe: Observe
) -> CommandReport:
    """Run the command of `shotclock exec`. This process forks the supervisor, because the command uses its terminal."""
    signals.forward_others()
    started = foreground.PolledSupervisor.start(task, signals)
    if isinstance(started, CommandReport):
        return started
    running = RunningCommand(started.control, started.client)

    def pass_signals_on() -> None:
        while (order := signals.next_order()) is not None:
            running.order(*order, report_within_ms=LAST_WORD_MS)

    def suspend() -> None:
        signals.suspend()
        running.order(Order.CONTINUE)

    running.on_suspended = suspend
    running.loop.add_reader(signals.fd, pass_signals_on)
    live_calls.enter(call)
    call.work = CommandWork(running, call)
    start_control(call, observe)
    try:
        await running.ended  # bounded by the client's own limits
    finally:
        live_calls.leave(call)
        running.loop.remove_reader(signals.fd)
        running.close()
    return started.finish(signals)


LEAVE_LIMIT_S = 0.5  # a process that has not exited this long after its stdin ended is sent TERM
# The process has answered, so its remaining work is not needed.
LEAVE_GRACE_MS = 500
CHUNK = 64 * 1024


class InteractiveProcess:
    """A running process with open stdin and stdout. The caller bounds `read` and `write`. Stdin -1 is /dev/null."""

    def __init__(self, running: RunningCommand, task: CommandTask, stdin: int, stdout: int) -> None:
        self._running = running
        self.task = task
        self._stdin, self._stdout = stdin, stdout
        self._waits: set[asyncio.Future[None]] = set()
        self.ended: asyncio.Task[CommandReport] = asyncio.ensure_future(_wait_for_end(running))
        for fd in (stdin, stdout):
            if fd >= 0:
                os.set_blocking(fd, False)

    @property
    def report(self) -> CommandReport | None:
        if not self.ended.done() or self.ended.cancelled():
            return None
        return self.ended.result() if self.ended.exception() is None else CommandReport()

    async def read(self) -> bytes:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)  # a process that never stops writing must not occupy the loop
        while self._stdout >= 0:
            try:
                return os.read(self._stdout, CHUNK)
            except BlockingIOError:
                await self._until(loop.add_reader, loop.remove_reader, self._stdout)
            except OSError:
                break
        return b""

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raises BrokenPipeError if the process has closed it."""
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

    @property
    def has_stdin(self) -> bool:
        return self._stdin >= 0

    async def close(self, *, politely: bool) -> None:
        """End the process, with all it started. Politely: its stdin ends, and it may exit by itself."""
        self.end_stdin()
        grace_ms = self.task.grace_ms
        if politely:
            await asyncio.wait([self.ended], timeout=LEAVE_LIMIT_S)
            grace_ms = min(grace_ms, LEAVE_GRACE_MS)
        if not self.ended.done():
            await self.stop("closed", grace_ms)

    async def stop(self, why: str, grace_ms: int) -> None:
        """Stop the process with all it started: TERM, grace, KILL."""
        self._running.order(Order.GRACE, grace_ms)
        self._running.order(Order.STOP, why)
        await asyncio.wait([self.ended])  # bounded by the client's own limits

    @contextlib.contextmanager
    def watched(self, on_input_wanted: Callable[[dict[str, object]], None]) -> Iterator[None]:
        """Pass the waits of the command for input on."""
        self._running.on_input_wanted = on_input_wanted
        yield

    def move_bell(self, bell_ns: int, kill_ns: int) -> None:
        self._running.move_bell(bell_ns, kill_ns)

    def end_stdin(self) -> None:
        if self._stdin >= 0:
            asyncio.get_running_loop().remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
        self._wake()

    def release(self) -> None:
        self.end_stdin()
        if self._stdout >= 0:
            asyncio.get_running_loop().remove_reader(self._stdout)
            os.close(self._stdout)
            self._stdout = -1
        self.ended.cancel()
        self._running.close()
        self._wake()

    async def _until(self, add: Callable[..., None], remove: Callable[[int], bool], fd: int) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(ready)
        add(fd, _set_result, ready, None)
        try:
            await ready
        finally:
            self._waits.discard(ready)
            if fd in (self._stdin, self._stdout):  # otherwise it was closed, and its number may be reused
                remove(fd)

    def _wake(self) -> None:
        for ready in self._waits:
            _set_result(ready, None)


@contextlib.asynccontextmanager
async def open_command(supervisors: Supervisors, task: CommandTask) -> AsyncIterator[InteractiveProcess]:
    """Start a command, and end it with its processes when the context is left: at once after an exception."""
    try:
        opened = await _open_once(supervisors, task)
    except TaskNotSent:  # the zygote was killed with the request; nothing began
        opened = await _open_once(supervisors, task)
    supervisors.register(opened._running)
    try:
        try:
            yield opened
        except BaseException:
            await _end(opened, politely=False)
            raise
        await _end(opened, politely=True)
    finally:
        supervisors.running.discard(opened._running)
        opened.release()


async def _end(opened: InteractiveProcess, *, politely: bool) -> None:
    """Wait for the exit. A cancellation kills the process, and still waits for its end."""
    closing = asyncio.ensure_future(opened.close(politely=politely))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        opened._running.order(Order.KILL, "closed")
        await run_shielded(asyncio.wait([closing], timeout=REPORT_LIMIT_MS / 1000))
        raise


async def _open_once(supervisors: Supervisors, task: CommandTask) -> InteractiveProcess:
    their_stdin, stdin = os.pipe() if task.stdin else (os.open(os.devnull, os.O_RDONLY), -1)
    fds = [their_stdin, *([stdin] if task.stdin else [])]
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


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
