"""The shared worker: many async functions on one loop, whose limits the runtime holds. docs/design.md: R29, R29a."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import threading
import types
from collections.abc import Coroutine, Generator
from contextvars import ContextVar, copy_context
from typing import Any, NoReturn

from . import ipc, kernel, messages, spans
from .clock import monotonic_ns
from .context import Scope, StartedProcesses, current_scope, watch
from .messages import BEGUN, RUNNING, Answer, Cancel, Done, Heard, Logged, Partial, Process, Progress, Run, Step
from .running_call import Reply, RunningCall, event_loop, reply_to_error, reply_to_result, take_answer

# Progress beyond this that a slow runtime has not read is dropped.
PROGRESS_HELD = 256 * 1024
# How often the shared worker sends the news of a handler that does not let the loop run.
SEND_AT_LEAST_NS = 5_000_000

_number: ContextVar[int] = ContextVar("shotclock_call_number", default=0)
"""Number of the call whose code runs, in its tasks and threads as well."""


class SharedWorker:
    def __init__(self, sock: socket.socket, words: memoryview) -> None:
        kernel.name_process("shotclock-host")
        sock.setblocking(False)
        self.loop = event_loop()
        self.words = words
        self._sock = sock
        self._inbox = messages.Reader(sock)
        self.pid = os.getpid()
        self._thread = threading.get_ident()
        self._context = copy_context()
        self.calls: dict[int, SharedCall] = {}
        self._outbox = bytearray()
        self._is_flushing = False
        self._flushed_ns = 0

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
                take_answer(message)
            elif (call := self.calls.get(message[0])) is not None:
                call.take(message)

    def _begin(self, request: Run) -> None:
        call = self.calls[request.number] = SharedCall(self, request)
        call.task = self.loop.create_task(call.run(), context=self._context.copy())
        call.task.add_done_callback(call.on_end, context=self._context)

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
            self.loop.call_soon_threadsafe(self.send, message, context=self._context)
            return
        self._outbox += messages.pack(message)
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush, context=self._context)

    def send_or_drop(self, message: Progress | Partial | Step | Logged) -> None:
        """Send news from any thread; drop them rather than pile them up."""
        if not self.is_here():
            self.loop.call_soon_threadsafe(self.send_or_drop, message, context=self._context)
        elif len(self._outbox) < PROGRESS_HELD:
            self.send(message)
            if monotonic_ns() - self._flushed_ns > SEND_AT_LEAST_NS:
                self._flush()

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

    def __init__(self, worker: SharedWorker, request: Run) -> None:
        super().__init__(request)
        self._worker = worker

    def send(self, message: messages.FromWorker) -> None:
        self._worker.send(message)

    def send_news(self, message: Progress | Partial | Step | Logged) -> None:
        self._worker.send_or_drop(message)

    def is_stopping(self) -> bool:
        if not self.stopping:
            self._worker.look()
        return self.stopping

    def take(self, message: ipc.Message) -> None:
        if isinstance(message, Cancel):
            self.send(Heard(self.number))
            self.stopping = True
            self.task.cancel()
        else:
            super().take(message)

    async def run(self) -> None:
        words, request = self._worker.words, self.request
        words[BEGUN] = self.number  # before any code of the call, as above
        spans.stand_at(self.trace)
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
                    result = await _note_running(result, words, self.number)  # type: ignore[misc]
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
            self.send(Done(self.number, "unserializable", f"the result cannot be sent: {error}", [], finished_ns))

    def on_end(self, task: asyncio.Task[None]) -> None:
        self._worker.calls.pop(self.number, None)
        if not self._has_replied:  # cancelled before its first step
            self.send(Done(self.number, "unbegun", None, [], monotonic_ns()))


@types.coroutine
def _note_running(handler: Coroutine[Any, Any, Any], words: memoryview, number: int) -> Generator[Any, None, Any]:
    """Await a handler, and write its number into the shared memory whenever its code holds the loop."""
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
