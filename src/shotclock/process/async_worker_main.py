"""Program of an async worker: one event loop, and the async handlers of all calls on it, for as long as it lives.

Runs below a supervisor. The runtime holds every clock; here nothing has to be trusted to end. What handlers keep in
memory (globals, pools bound to the loop) is there for all of them, and gone with the process.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
import select
import socket
import threading
import types
from collections.abc import Coroutine, Generator
from typing import Any, NoReturn

from . import call_processes, ipc, kernel, messages
from .clock import monotonic_ns
from .context import Scope, current_scope
from .messages import (
    Answer,
    Cancel,
    Done,
    Heard,
    MoveBell,
    Partial,
    Process,
    Progress,
    Ready,
    Run,
    Step,
    WindDown,
    Wrote,
)
from .worker_main import Reply, RunningCall, call_variables, reply_to_error, reply_to_result, take_answer

# The memory an async worker shares with the runtime, in words of eight bytes. It can be read when nothing here answers.
SHARED_SIZE = 4096
BEGUN = 0
"""The highest number of a call that has begun. Calls begin in the order of their numbers."""
RUNNING = 1
"""The number of the call whose code runs at this moment; 0 where none does, or it is not known."""
CLOSED = 2
"""Set by the runtime: nothing may begin any more."""

_number: contextvars.ContextVar[int] = contextvars.ContextVar("shotclock_call_number", default=0)
"""Of the call whose code runs, in the tasks and threads that it has started as well."""

# Progress that a slow runtime has not taken yet is dropped beyond this; newer progress says more.
PROGRESS_HELD = 256 * 1024
# A handler that does not let the loop run still has what it says sent this often.
SAY_AT_LEAST_NS = 5_000_000


def serve_async_calls(sock: socket.socket, memory: int) -> NoReturn:
    """Serve calls until the runtime closes the socket, or the supervisor kills us."""
    kernel.name_process("shotclock-host")
    call_variables.remove_prepared()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sock.setblocking(False)
    words = memoryview(mmap.mmap(memory, SHARED_SIZE)).cast("Q")
    os.close(memory)
    _AsyncWorker(sock, words).serve()


class _AsyncWorker:
    def __init__(self, sock: socket.socket, words: memoryview) -> None:
        self.loop = asyncio.new_event_loop()
        self.words = words
        self._sock = sock
        self._inbox = messages.Reader(sock)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self.pid = os.getpid()
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()
        self._calls: dict[int, _Call] = {}
        self.questions: dict[int, asyncio.Future[bytes]] = {}
        self._outbox = bytearray()
        self._flushing = False
        self._flushed_ns = 0

    def serve(self) -> NoReturn:
        asyncio.set_event_loop(self.loop)
        self.loop.set_task_factory(self._make_task)
        call_processes.watch(self._report_process)
        self.loop.add_reader(self._sock, self._read)
        self.send(Ready())
        while True:
            try:
                self.loop.run_forever()  # unbounded on purpose: it ends with the socket, or by the supervisor
            except BaseException:
                pass  # a task that some handler started wanted to exit; the others' worker is not its to end

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task. Those that a call starts run its code as well: whoever looks at the shared memory has to find
        its number."""
        context = options.get("context")
        number = _number.get() if context is None else context.get(_number, 0)
        if number and isinstance(work, types.CoroutineType):
            work = _trace_task(work, self.words, number)
        return asyncio.Task(work, loop=loop, **options)

    def _report_process(self, started: call_processes.StartedProcesses, pid: int) -> None:
        """Send at once that a call has started a process, so that it can be killed whatever its loop does then."""
        self.send_from_anywhere(Process(_number.get(), started.mark, pid))
        if self.is_here():
            self._flush()

    # --- what the runtime says ----------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            received = self._inbox.receive()
        except BlockingIOError:
            return
        except ipc.Broken:
            os._exit(0)
        for message in received:
            self._take(message)

    def _take(self, message: ipc.Message) -> None:
        match message:
            case Run():
                call = self._calls[message.number] = _Call(self, message)
                call.task = self.loop.create_task(call.run(), context=self._context.copy())
                call.task.add_done_callback(call.on_end, context=self._context)
            case Cancel():
                self.send(Heard(message.number))
                if (cancelled := self._calls.get(message.number)) is not None:
                    cancelled.stopping = True
                    cancelled.task.cancel()
            case WindDown():
                if (warned := self._calls.get(message.number)) is not None:
                    warned.stopping = True
            case MoveBell():
                if (moved := self._calls.get(message.number)) is not None:
                    moved.take_bell(message)
            case Answer():
                take_answer(message, self.questions)

    def look(self) -> None:
        """Read what has come, for a handler that asks without letting the loop run."""
        if self.is_here() and self._poller.poll(0):
            self._read()
            self._flush()

    # --- what is said to it -------------------------------------------------------------------------------

    def is_here(self) -> bool:
        """Return whether this is the loop's thread, and not one that a handler has started."""
        return threading.get_ident() == self._thread

    def send(self, message: messages.FromWorker) -> None:
        """Send a message at the end of this turn of the loop, together with whatever else is sent until then."""
        self._outbox += messages.pack(message)
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush, context=self._context)

    def send_from_anywhere(self, message: messages.FromWorker) -> None:
        """Send a message that may come from a thread which a handler has started."""
        if self.is_here():
            self.send(message)
        else:
            self.loop.call_soon_threadsafe(self.send, message, context=self._context)

    def send_or_drop(self, message: Progress | Partial | Step) -> None:
        """Send progress and the like: from any thread, and dropped rather than piled up."""
        if not self.is_here():
            self.loop.call_soon_threadsafe(self.send_or_drop, message, context=self._context)
        elif len(self._outbox) < PROGRESS_HELD:
            self.send(message)
            if monotonic_ns() - self._flushed_ns > SAY_AT_LEAST_NS:
                self._flush()

    def _flush(self) -> None:
        self._flushing = False
        self._flushed_ns = monotonic_ns()
        outbox = self._outbox
        try:
            while outbox:
                del outbox[: self._sock.send(outbox)]
        except (BlockingIOError, InterruptedError):
            self._flushing = True
            self.loop.add_writer(self._sock, self._flush_rest)
        except OSError:
            os._exit(0)

    def _flush_rest(self) -> None:
        self.loop.remove_writer(self._sock)
        self._flush()

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)


class _Call(RunningCall):
    """One of the calls on the loop."""

    def __init__(self, worker: _AsyncWorker, request: Run) -> None:
        super().__init__(request, worker.questions)
        self._worker = worker
        self._has_replied = False
        self.task: asyncio.Task[None]

    def send(self, message: messages.FromWorker) -> None:
        self._worker.send(message)

    def send_news(self, message: Progress | Partial | Step) -> None:
        self._worker.send_or_drop(message)

    def write(self, text: str) -> None:
        self._worker.send_from_anywhere(Wrote(self.number, text))

    def is_stopping(self) -> bool:
        if not self.stopping:
            self._worker.look()
        return self.stopping

    async def run(self) -> None:
        words, request = self._worker.words, self.request
        # In this order: whoever closes sets its word first and looks at ours then, so one of us sees the other's.
        words[BEGUN] = self.number
        if words[CLOSED]:
            return

        self.trace.stand()
        _number.set(self.number)
        scope = Scope(self.deadline, request.depth, request.name, self.trace, overtime_address=request.overtime_address)
        current_scope.set(scope)
        words[RUNNING] = self.number
        reply: Reply
        try:
            bound = self.bind()
            if isinstance(bound, tuple):
                reply = bound
            else:
                result = bound()
                if isinstance(result, types.CoroutineType):
                    result = await _trace_handler(result, words, self.number)
                elif hasattr(result, "__await__"):
                    words[RUNNING] = 0
                    result = await result
                words[RUNNING] = self.number
                reply = reply_to_result(result)
        except asyncio.CancelledError:
            reply = "cancelled", None
        except BaseException as error:
            reply = reply_to_error(error)
        if os.getpid() != self._worker.pid:  # the handler forked and came back twice; its caller waits for one answer
            os._exit(0)
        finished_ns = monotonic_ns()
        words[RUNNING] = 0
        self._has_replied = True
        try:
            self.send(Done(self.number, *reply, [], finished_ns))
        except (ValueError, OverflowError) as error:  # gigabytes
            why = f"the result cannot be sent: {error}"
            self.send(Done(self.number, "unserializable", why, [], finished_ns))

    def on_end(self, task: asyncio.Task[None]) -> None:
        self._worker.forget(self.number)
        if not self._has_replied:  # cancelled before its first step
            self.send(Done(self.number, "unbegun", None, [], monotonic_ns()))


async def _trace_task(work: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Any:
    return await _trace_handler(work, words, number)


@types.coroutine
def _trace_handler(handler: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Generator[Any, None, Any]:
    """Await a handler, and write into the shared memory whenever it is its code that holds the loop."""
    thrown: BaseException | None = None
    while True:
        words[RUNNING] = number
        try:
            waits_for = handler.send(None) if thrown is None else handler.throw(thrown)
        except StopIteration as returned:
            return returned.value
        finally:
            words[RUNNING] = 0
        try:
            yield waits_for
            thrown = None
        except BaseException as error:
            thrown = error
