"""The shared worker: many functions in one process, whose limits the runtime holds.

Async functions run on its loop, and each sync one in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import select
import socket
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn

from ..core.errors import Failure
from ..supervise import ipc, kernel, spans
from ..supervise.clock import monotonic_ns
from . import messages
from .context import Scope, StartedProcesses, Stopped, current_scope, watch, work_in_pools
from .lifespan import HeldState, Lifespan, NotOpened, run_in_thread
from .messages import (
    BEGUN,
    LIFESPAN_RUNS,
    RUNNING,
    STATES,
    Answer,
    Ask,
    Cancel,
    CloseStates,
    Done,
    FurtherCall,
    Heard,
    Logged,
    Opened,
    Partial,
    Process,
    Progress,
    Run,
    StatesClosed,
    Step,
)
from .running_call import (
    Reply,
    RunningCall,
    describe_fully,
    event_loop,
    read_stdin_from,
    reply_to_error,
    reply_to_result,
    set_answer,
    wait_in_thread,
)

# Progress beyond this that a slow runtime has not read is dropped.
PROGRESS_HELD = 256 * 1024
# Messages of threads that the loop has not taken. Beyond this, their news is dropped.
NEWS_HELD = 1_000
# How often the shared worker sends the news of a handler that does not let the loop run.
SEND_AT_LEAST_NS = 5_000_000
# How long a thread that computes keeps the interpreter from the loop, which has to read cancellations. With Python's
# 5 ms, five such threads got the process replaced; this costs those threads a seventh.
THREAD_TURN_S = 0.0005
# How long calls that run while the states are to be closed may take to end.
CALLS_END_S = 0.5

_number: ContextVar[int] = ContextVar("shotclock_call_number", default=0)
"""Number of the call whose code runs, in its tasks and threads as well."""


class SharedWorker:
    def __init__(self, sock: socket.socket, words: memoryview) -> None:
        sys.setswitchinterval(THREAD_TURN_S)
        kernel.name_process("shotclock-host")
        sock.setblocking(False)
        self.loop: asyncio.AbstractEventLoop = event_loop()
        self.words = words
        self._sock = sock
        self._inbox = messages.Reader(sock)
        self.pid: int = os.getpid()
        self._thread = threading.get_ident()
        self._context = copy_context()
        self.calls: dict[int, SharedCall] = {}
        self._states: dict[str, HeldState] = {}
        self._closing: asyncio.Task[None] | None = None
        self._outbox = bytearray()
        self._is_flushing = False
        self._flushed_ns = 0
        self._from_threads: deque[messages.FromWorker] = deque()
        self._is_woken = False
        """The loop will take the messages of threads."""

    def serve(self) -> NoReturn:
        watch(self._report_process)
        self.loop.add_reader(self._sock, self._read)
        while True:
            with contextlib.suppress(BaseException):  # a handler's task that exits must not end the others' worker
                self.loop.run_forever()  # unbounded on purpose: it ends with the socket, or by the supervisor

    def _report_process(self, started: StartedProcesses, pid: int) -> None:
        """Report at once that a call has started a process: it can be killed whatever its loop does then."""
        self.send(Process(_number.get(), started.mark, pid))
        if self.is_here():
            self._flush()

    def _read(self) -> None:
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            os._exit(0)
        for message in received:
            if isinstance(message, Run):
                self._begin(message)
            elif isinstance(message, Answer):
                set_answer(message)
            elif isinstance(message, CloseStates):
                self._closing = self.loop.create_task(self._close_states(), context=self._context.copy())
            elif (call := self.calls.get(message[0])) is not None:
                call.take(message)

    def _begin(self, request: Run) -> None:
        call = self.calls[request.number] = SharedCall(self, request)
        call.task = self.loop.create_task(call.run(), context=self._context.copy())
        call.task.add_done_callback(call.on_end, context=self._context)

    def state_of(self, lifespan: Lifespan) -> HeldState:
        if lifespan.key not in self._states:
            self.words[STATES] += 1
            held = HeldState(lifespan, partial(_record_running, words=self.words, number=LIFESPAN_RUNS), self._context)
            self._states[lifespan.key] = held
        return self._states[lifespan.key]

    async def _close_states(self) -> None:
        """Stop the calls and close the lifespans. The runtime kills this process if that takes too long."""
        for call in self.calls.values():
            call.stop()
        if self.calls:
            await asyncio.wait([call.task for call in self.calls.values()], timeout=CALLS_END_S)
        await asyncio.gather(*(held.close() for held in self._states.values()))
        self.send(StatesClosed())

    def look(self) -> None:
        """Read messages for a handler that asks without letting the loop run."""
        if self.is_here() and select.select([self._sock], [], [], 0)[0]:
            self._read()
            self._flush()

    def is_here(self) -> bool:
        """Return whether this is the loop's thread, and not the copy of it in a process that a handler forked."""
        return threading.get_ident() == self._thread and os.getpid() == self.pid

    def send(self, message: messages.FromWorker) -> None:
        """Send a message from any thread, at the end of this turn of the loop with the others of the turn."""
        if not self.is_here():
            self._send_from_thread(message)
            return
        self._handle_from_threads()  # from Python 3.14 on a handler may continue before the loop does this
        self._pack(message)

    def _pack(self, message: messages.FromWorker) -> None:
        self._outbox += messages.pack(message)
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush, context=self._context)

    def send_or_drop(self, message: Progress | Partial | Step | Logged) -> None:
        """Send news from any thread; drop them rather than pile them up."""
        if not self.is_here():
            if len(self._from_threads) < NEWS_HELD:
                self._send_from_thread(message)
        elif len(self._outbox) < PROGRESS_HELD:
            self.send(message)
            if monotonic_ns() - self._flushed_ns > SEND_AT_LEAST_NS:
                self._flush()

    def _send_from_thread(self, message: messages.FromWorker) -> None:
        self._from_threads.append(message)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._handle_from_threads, context=self._context)

    def _handle_from_threads(self) -> None:
        self._is_woken = False  # first: a thread that appends from now on wakes the loop again
        while self._from_threads:
            message = self._from_threads.popleft()
            is_news = isinstance(message, Progress | Partial | Step | Logged)
            if not is_news or len(self._outbox) < PROGRESS_HELD:
                self._pack(message)

    def _flush(self) -> None:
        self._is_flushing = False
        self._flushed_ns = monotonic_ns()
        outbox = self._outbox
        try:
            while outbox:
                del outbox[: self._sock.send(outbox)]
        except (BlockingIOError, InterruptedError):
            self._is_flushing = True
            self.loop.add_writer(self._sock, self._flush_rest)
        except OSError:
            os._exit(0)

    def _flush_rest(self) -> None:
        self.loop.remove_writer(self._sock)
        self._flush()


class SharedCall(RunningCall):
    task: asyncio.Task[None]
    _has_replied = False
    _is_in_thread = False
    """It is a sync function. Its task waits for the thread, and is not cancelled."""
    _is_stopped = False
    _owes_stop = False
    """A sync function is to be stopped, and has not noticed: the next use of its context raises Stopped, once."""
    _state: tuple[Any] | None = None
    """The state when the call began, also if its lifespan is opened anew meanwhile."""
    _finished_ns = 0

    def __init__(self, worker: SharedWorker, request: Run) -> None:
        super().__init__(request)
        self._worker = worker
        self._waits: set[asyncio.Task[Any]] = set()
        """On the loop, for its thread."""

    def send(self, message: messages.FromWorker) -> None:
        self._raise_if_owed()
        self._worker.send(message)

    def send_news(self, message: Progress | Partial | Step | Logged) -> None:
        self._raise_if_owed()
        self._worker.send_or_drop(message)

    def is_stopping(self) -> bool:
        if not self.stopping:
            self._worker.look()
        elif not self._worker.is_here():
            self._owes_stop = False  # it knows
        return self.stopping

    def state(self) -> Any:
        if self._state is None:
            raise Failure("STATE_UNAVAILABLE", f"there is no lifespan whose state {self.request.name} could read")
        return self._state[0]

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, Cancel):
            self._worker.send(Heard(self.number))
            self.stop()
        else:
            super().take(message)

    def stop(self) -> None:
        """Cancel an async function; ask a sync one, by `ctx.stopping` and by Stopped where it uses its context."""
        self.stopping = self._is_stopped = True
        if not self._is_in_thread:
            self.task.cancel()
            return
        self._owes_stop = True
        for wait in list(self._waits):
            wait.cancel()

    def _raise_if_owed(self) -> None:
        if self._owes_stop and not self._worker.is_here():
            self._owes_stop = False
            raise Stopped

    def answer_to(self, message: FurtherCall | Ask, unpickle: Callable[[bytes], Any]) -> Any:
        if not self._is_in_thread or self._worker.is_here():
            return super().answer_to(message, unpickle)
        return self._wait_in_thread(super().answer_to(message, unpickle))

    def _wait_in_thread(self, coroutine: Coroutine[Any, Any, Any], *, is_clean_up: bool = False) -> Any:
        """Return the result of a coroutine that runs on the loop. Raises Stopped if the call is stopped meanwhile.

        Clean-up begins also in a call that is to stop: its function has ended.
        """
        ended: Future[Any] = Future()

        def begin() -> None:
            # `_has_replied`: ignore questions of a thread that outlived its call.
            if self._has_replied or (self._owes_stop and not is_clean_up):
                coroutine.close()
                ended.cancel()
                return
            self._owes_stop = False
            task = self._worker.loop.create_task(coroutine)
            self._waits.add(task)
            task.add_done_callback(hand_over)

        def hand_over(task: asyncio.Task[Any]) -> None:
            self._waits.discard(task)
            if task.cancelled():
                ended.cancel()
            elif (error := task.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(task.result())

        self._worker.loop.call_soon_threadsafe(begin)
        try:
            return ended.result()  # bounded: the end of the call cancels the task
        except CancelledError:
            self._owes_stop = False
            raise Stopped from None

    async def run(self) -> None:
        words, request = self._worker.words, self.request
        words[BEGUN] = self.number  # before any code of the call, as above
        spans.stand_at(self.trace)
        _number.set(self.number)
        scope = Scope(self.deadline, request.depth, request.name, self.trace, overtime_address=request.overtime_address)
        current_scope.set(scope)
        reply: Reply = await _record_running(self._perform(), words, self.number)
        if os.getpid() != self._worker.pid:  # the handler forked and came back twice; its caller waits for one answer
            os._exit(0)
        finished_ns = self._finished_ns or monotonic_ns()
        # Threads of `asyncio.to_thread` and the like, which a cancellation does not stop.
        while self._is_stopped and (left := work_in_pools(scope)):  # bounded by the runtime, which kills this process
            with contextlib.suppress(asyncio.CancelledError):  # of other code
                await asyncio.wait(list(map(asyncio.wrap_future, left)))
        self._has_replied = True
        try:
            self._worker.send(Done(self.number, *reply, [], finished_ns))
        except (ValueError, OverflowError) as error:  # gigabytes
            why = f"the result cannot be sent: {error}"
            self._worker.send(Done(self.number, "unserializable", why, [], finished_ns))

    async def _perform(self) -> Reply:
        try:
            if self.request.stdin_path is not None:  # on a command line alone, whose only call this is
                read_stdin_from(self.request.stdin_path)
            bound = self.bind()
            if isinstance(bound, tuple):
                return bound
            lifespan: Lifespan | None = getattr(bound.func, "lifespan", None)
            if lifespan is not None and (refusal := await self._open_state(lifespan)) is not None:
                return refusal
            if inspect.iscoroutinefunction(bound.func):
                return reply_to_result(await bound())
            return await self._run_in_thread(bound)
        except asyncio.CancelledError:
            return "cancelled", None
        except BaseException as error:
            return reply_to_error(error, self.errors_shown)

    async def _open_state(self, lifespan: Lifespan) -> Reply | None:
        """Wait until the state of the App is open. Return the reply if the function cannot be run."""
        held = self._worker.state_of(lifespan)
        if held.is_open:
            self._state = (held.value(),)
            return None
        try:
            state, why_again = await held.open()
        except asyncio.CancelledError:
            return "unopened", None
        except NotOpened as refusal:
            return "unopened", describe_fully(refusal.__cause__ or refusal)
        self._state = (state,)
        self.send(Opened(self.number, lifespan.key, why_again))
        return None

    async def _run_in_thread(self, bound: Callable[[], Any]) -> Reply:
        """Run a sync function in a thread, and wait for its end, also if the task is cancelled."""
        self._is_in_thread = True
        wait_in_thread.set(self._wait_in_thread)
        try:
            ended = run_in_thread(partial(self._reply_in_thread, bound), f"shotclock-{self.request.name}")
        except Failure as failure:
            return "unstartable", str(failure)
        while not ended.done():  # bounded by the runtime, which kills this process
            with contextlib.suppress(asyncio.CancelledError):  # of other code: the thread runs on
                await asyncio.wait([ended])
        reply: Reply = ended.result()
        return reply

    def _reply_in_thread(self, bound: Callable[[], Any]) -> Reply:
        try:
            result = bound()
            if isinstance(result, types.CoroutineType):
                result = self._wait_in_thread(result)
            reply = reply_to_result(result)
        except Stopped:
            reply = "cancelled", None
        except BaseException as error:
            reply = reply_to_error(error, self.errors_shown)
        if os.getpid() != self._worker.pid:
            os._exit(0)
        self._finished_ns = monotonic_ns()
        return reply

    def on_end(self, task: asyncio.Task[None]) -> None:
        self._worker.calls.pop(self.number, None)
        for wait in list(self._waits):
            wait.cancel()
        if not self._has_replied:  # cancelled before its first step
            self._worker.send(Done(self.number, "unbegun", None, [], monotonic_ns()))


async def _record_running(work: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Any:
    """Await a coroutine, and write a number into the shared memory whenever its code holds the loop."""
    return await _step_by_step(work, words, number)


@types.coroutine
def _step_by_step(handler: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Generator[Any, None, Any]:
    thrown: BaseException | None = None
    while True:
        words[RUNNING] = number
        try:
            awaited = handler.send(None) if thrown is None else handler.throw(thrown)
        except StopIteration as returned:
            return returned.value
        finally:
            words[RUNNING] = 0
        try:
            yield awaited
            thrown = None
        except BaseException as error:
            thrown = error
